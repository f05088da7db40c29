"""`covey completion`: verbs, options and the words that they know for the shell's Tab key."""

import ast
import functools
import importlib
import typing
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import covey
from covey.cli import output
from covey.cli.early import option_types
from covey.cli.fields import enum_values
from covey.cli.flags import Flag
from covey.cli.verb import Args, Verb, Verbs
from covey.config.options import DECLARED
from covey.errors import ConfigError, did_you_mean

_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
_FISH_VERB = "complete -c covey -n __fish_use_subcommand -a {verb} -d {sentence}\n"
_FISH_FLAG = "complete -c covey -n '__fish_seen_subcommand_from {verb}' -l {flag}{values} -d {sentence}\n"
_FISH_BELOW = "complete -c covey -n '__fish_seen_subcommand_from {verb}' -a '{words}'\n"
_BELOW = {"data": ("check", "clean", "pivots"), "reward": ("test", "train", "audit"), "doctor": ("memory", "plan", "demo"), "env": ("check",), "completion": ("bash", "zsh", "fish"), "train": ("demo",), "tune": ("demo",), "chat": ("demo",), "eval": ("demo",)}  # fmt: skip
"""Words that may stand behind a verb without a flag."""
_SHELLS = ("bash", "zsh", "fish")


def run(args: Args) -> None:
    """Print the script for one shell."""
    shell = args.get("shell")
    if shell not in _SHELLS:
        hint = did_you_mean(str(shell), _SHELLS) if shell else ""
        raise ConfigError(f"covey completion needs a shell: {', '.join(_SHELLS)}.{hint}")
    output.result(script(str(shell)).rstrip())


def script(shell: str) -> str:
    """Completion script of a shell."""
    from covey.cli import VERBS

    flags = {name: _flags(name) for name in VERBS}
    values = {
        name: {flag: choices for flag, option in verb_flags.items() if (choices := values_of(option))}
        for name, verb_flags in flags.items()
    }
    if shell == "fish":
        lines = [_FISH_VERB.format(verb=name, sentence=_quote(sentence)) for name, sentence in VERBS.items()]
        lines += [_FISH_BELOW.format(verb=name, words=" ".join(words)) for name, words in _BELOW.items()]
        for name, verb_flags in flags.items():
            for flag, option in verb_flags.items():
                words = f" -x -a '{' '.join(values[name][flag])}'" if flag in values[name] else ""
                lines.append(_FISH_FLAG.format(verb=name, flag=flag, values=words, sentence=_quote(option.help)))
        return "".join(lines)
    cases = "\n".join(
        f'            {name}) words="{" ".join("--" + flag for flag in verb_flags)}" ;;'
        for name, verb_flags in flags.items()
    )
    of_values = "\n".join(
        f'            "{name} --{flag}") words="{" ".join(words)}" ;;'
        for name, verb_values in values.items()
        for flag, words in verb_values.items()
    )
    below = "\n".join(f'                {name}) words="$words {" ".join(words)}" ;;' for name, words in _BELOW.items())
    text = Path(__file__).with_suffix(".bash").read_text()
    for place, words in {"verbs": " ".join(VERBS), "cases": cases, "values": of_values, "below": below}.items():
        text = text.replace(f"@{place}@", words)
    return (_ZSH if shell == "zsh" else "") + text


def _flags(name: str) -> dict[str, Flag]:
    """Flags of a verb, or of all verbs below it, such as those of `data check` and `data clean`."""
    module = importlib.import_module(f"covey.cli.{name.replace('-', '_')}")
    groups = [member.verbs.values() for member in vars(module).values() if isinstance(member, Verbs)]
    verbs = [*chain(*groups), *(member for member in vars(module).values() if isinstance(member, Verb))]
    return {flag.name.replace("_", "-"): flag for verb in verbs for flag in verb.flags()}


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


verb = Verb(
    name="completion",
    usage="bash | zsh | fish",
    sentence="Let the Tab key complete verbs and options: print the script for your shell.",
    flags=tuple,
    run=run,
    positional=("shell",),
    examples=(
        "source <(covey completion bash)                                     # in ~/.bashrc",
        "covey completion fish > ~/.config/fish/completions/covey.fish",
    ),
)


_SOURCE = Path(str(covey.__file__)).parent
_DTYPES = ("auto", "float32", "bfloat16", "float16")


@functools.cache
def _words_by_flag() -> Mapping[str, tuple[str, ...]]:
    trackers = ("none", "tensorboard", "wandb", "trackio", "mlflow")
    return {
        **{name: option.words for name, option in DECLARED.items() if option.words},
        "lr_scheduler_type": enum_values("trainer_utils", "SchedulerType"),
        "optim": enum_values("training_args", "OptimizerNames"),
        "algorithm": names_in("algorithms/presets.py", "PRESETS"),
        "reward": (*names_in("rewards/builtin/registry.py", "BUILTIN"), "demo"),
        "report_to": trackers,
        "dtype": _DTYPES,
        "resume": ("auto", "never"),
        "model": ("demo",),
        "dataset": ("demo", "demo:test", "gym:", "harbor:", "verifiers:"),
        "eval_dataset": ("demo:test",),
        "pruner": ("median", "halving", "none"),
        "log_level": ("debug", "info", "warning", "error", "critical", "passive"),
        "reward_weights": (),
    }


def values_of(flag: Flag) -> tuple[str, ...]:
    """The words that may follow this flag; empty where anything may."""
    if flag.name in _words_by_flag():
        return _words_by_flag()[flag.name]
    kind = option_types().get(flag.name, flag.type)
    literals = [
        alternative
        for alternative in (kind, *typing.get_args(kind))
        if typing.get_origin(alternative) is typing.Literal
    ]
    words = tuple(str(value) for literal in literals for value in typing.get_args(literal) if isinstance(value, str))
    return words or (("true", "false") if flag.is_switch and str(flag.default) == "True" else ())


@functools.cache
def names_in(file: str, variable: str) -> tuple[str, ...]:
    """The keys of a mapping, or the names that it is made of, in a file of Covey."""
    for node in ast.parse((_SOURCE / file).read_text()).body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if not (isinstance(target, ast.Name) and target.id == variable) or not isinstance(node, ast.AnnAssign):
            continue
        if isinstance(node.value, ast.Dict):
            return tuple(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
        if isinstance(node.value, ast.DictComp):
            inside = ast.walk(node.value.generators[0].iter)
            return tuple(dict.fromkeys(part.id for part in inside if isinstance(part, ast.Name)))
    raise LookupError(f"{file} has no mapping {variable}.")
