"""A verb: its flags and the function that does it. One small file each; `covey.cli` finds them by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.cli import output
from covey.cli.flags import Flag, read_flags, read_yaml, spelled, typed
from covey.cli.help import flags_help
from covey.cli.recipe import expanded
from covey.errors import ConfigError, did_you_mean
from covey.files.places import refuse_missing, refuse_variable

Args = Mapping[str, Any]
"""Typed values of the flags on the command line, by name."""

_PLAIN: Mapping[str, Any] = {
    **{kind.__name__: kind for kind in (bool, int, float, str)},
    **{str(kind): kind for kind in (list[str], list[int], list[float])},
}
_ALWAYS = (
    Flag(name="help", help="Show the common options and stop.", type=bool, group="help"),
    Flag(name="help_all", help="Show every option and stop.", type=bool, group="help"),
    Flag(name="debug", help="Show tracebacks.", type=bool, group="help"),
)
PLACES = {"model": "model folder", "dataset": "data set", "eval_dataset": "data set"}
"""`Verb.places` of a verb that trains."""
WRITTEN = frozenset({"output", "folder", "learn_folder"})
"""Flags that name a folder or a file to write."""
JSON = Flag(name="json", help="Print the result as one JSON object on the last line.", type=bool, group="output")
CONFIG = Flag(name="config", help="YAML file of options; flags win over it.", group="run")


@dataclass(frozen=True, kw_only=True)
class Verb:
    """`run` takes the typed flags and returns the exit code (None: 0)."""

    name: str
    usage: str
    """After the verb: `MODEL [options]`."""
    sentence: str
    flags: Callable[[], Sequence[Flag]]
    run: Callable[[dict[str, Any]], int | None]
    positional: Sequence[str] = ()
    examples: Sequence[str] = ()
    quiet_flags: Callable[[], Sequence[Flag]] = tuple
    """Flags that are read but not shown."""
    types: Callable[[], Mapping[str, Any]] = dict
    """Types of flags that are declared as text; imported only once every name is right."""
    hints: Mapping[str, str] = field(default_factory=dict)
    """Hints for flags that belong to another verb, by name."""
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options that a word stands for where a YAML file may stand."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """For each flag that must be given, the rest of a sentence: covey plot needs ..."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Flags that name a "model folder" or a "data set": one that is written like a path must exist."""
    has_defaults: bool = True
    """True: `run` receives a value of every flag; False: those of the command and its file alone."""

    def __call__(self, arguments: Sequence[str]) -> int:
        """Read the arguments and do it. Returns the exit code."""
        is_all = "--help-all" in arguments or "--help_all" in arguments
        declared = self.flags()
        shown = [*declared, *_ALWAYS]
        if is_all or "--help" in arguments or "-h" in arguments:
            usage = f"covey {self.name} {self.usage}"
            output.result(flags_help(usage, self.sentence, self.examples, shown, is_all=is_all))
            return 0
        flags = [*self.quiet_flags(), *shown]  # a later flag of the same name wins, such as --debug
        args = read_flags(arguments, flags, self.positional, self.hints)
        args = expanded({**self._from_file(args.pop("config", None), flags), **args}, flags, self.hints)
        args.pop("debug", None)
        types: dict[str, Any] = {flag.name: _PLAIN.get(flag.kind, flag.type) for flag in flags}
        if any(isinstance(types.get(name, str), str) for name in args):
            types |= self.types()
        options = typed(args, {**dict.fromkeys(self.positional, str), **types})
        if self.has_defaults:
            options = {flag.name: flag.default for flag in declared} | options
        for name, what in self.needs.items():
            if options.get(name) in (None, "", []):
                raise ConfigError(f"covey {self.name} needs {what}")
        refuse_missing_places(options, self.places)
        for name in WRITTEN & options.keys():
            refuse_variable(spelled(name), str(options[name]))
        for flag in declared:
            flag.refuse_outside(options.get(flag.name))
        seed = options.get("seed", 0)
        if isinstance(seed, int) and not 0 <= seed < 2**32:
            raise ConfigError(f"--seed {seed} must be between 0 and {2**32 - 1}.")
        return self.run(options) or 0

    def _from_file(self, config: str | None, flags: Sequence[Flag]) -> Mapping[str, Any]:
        if config is None:
            return {}
        if config in self.presets and not Path(config).exists():
            return self.presets[config]
        near = "" if Path(config).exists() else did_you_mean(config, self.presets)
        if near:
            raise ConfigError(f"There is no file {config}.{near}")
        if Path(config).suffix == ".py":
            raise ConfigError(
                f"{config} is a Python script, and covey {self.name} reads options: python {config} runs it."
            )
        if not Path(config).exists() and Path(config).suffix.lower() not in (".yaml", ".yml", ".json"):
            raise ConfigError(
                f"{config!r} is neither an option nor a configuration file. Options are written --name value; one that is "
                "True or False stands alone: --name, or --no-name."
            )
        return read_yaml(config, flags, self.hints)


def refuse_missing_places(options: Args, places: Mapping[str, str]) -> None:
    """Raise CoveyError for a model or a data set that is written like a path and is not there, before torch is imported."""
    for name, what in places.items():
        values = options.get(name)
        for place in values if isinstance(values, list) else [values]:
            if isinstance(place, str):
                refuse_missing(place, what)


@dataclass(frozen=True, kw_only=True)
class Verbs:
    """Verbs below another, such as `covey data check`."""

    name: str
    usage: str
    """After the verbs: `DATASET ...`."""
    verbs: Mapping[str, Verb]

    def __call__(self, arguments: Sequence[str]) -> int:
        """Do what the first word says. Returns the exit code."""
        name = arguments[0] if arguments else "--help"
        if name in self.verbs:
            return self.verbs[name](arguments[1:])
        if name not in ("--help", "-h", "--help-all"):
            hint = did_you_mean(name, self.verbs)
            raise ConfigError(f"covey {self.name} has no {name!r}.{hint} It has {', '.join(self.verbs)}.")
        lines = [f"  covey {verb.name} {verb.usage}\n      {verb.sentence}" for verb in self.verbs.values()]
        usage = f"usage: covey {self.name} {'|'.join(self.verbs)} {self.usage}"
        last = f"covey {self.name} {next(iter(self.verbs))} --help shows the options."
        show, code = (output.result, 0) if arguments else (output.say, 2)
        show("\n".join([usage, "", *lines, "", last]))
        return code
