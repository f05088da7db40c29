"""Flags of a verb: declared, read from the command line and a YAML file, and turned into typed values.

Nothing heavy is imported before every name is known to be right, so a typo is answered at once.
"""

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from covey.errors import ConfigError, did_you_mean
from covey.files.bounded import MOST_DEPTH, json_depth, read_text, refuse_odd_numbers, yaml_of
from covey.runs.masking import mask

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"-\.?\d")
_YES_NO = frozenset({"true", "false", "yes", "no", "on", "off", "null", "none"})


def spelled(option: str) -> str:
    """An option as it is spelled on the command line: `--save-steps` for `save_steps`."""
    return "--" + option.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One option of a verb. `--max-steps 10`, `--max_steps=10` and `max_steps: 10` in YAML are the same."""

    name: str
    """Name with underscores."""
    help: str
    """One sentence."""
    type: Any = str
    """Type of the value, or an annotation as text where the type is known later."""
    default: Any = None
    """Default as help shows it."""
    least: float | None = None
    """Least number that it may be."""
    most: float | None = None
    """Greatest, where there is a least one."""
    group: str = "options"
    is_common: bool = True
    """Shown by `--help`; the others by `--help-all`."""
    short: str = ""
    """One letter after one dash, as in `-o FILE`."""
    bare: str = ""
    """Value of the flag without one; "": it needs one."""

    @property
    def kind(self) -> str:
        """The type as text."""
        return self.type if isinstance(self.type, str) else getattr(self.type, "__name__", str(self.type))

    @property
    def is_switch(self) -> bool:
        """True if the bare flag means yes."""
        return self.kind.startswith("bool")

    @property
    def is_list(self) -> bool:
        """True if several values may follow."""
        return "list[" in str(self.type)

    @property
    def spelled(self) -> str:
        """Spelling on the command line."""
        return spelled(self.name)

    def refuse_outside(self, value: float | None) -> None:
        """Raise ConfigError for a number below `least` or above `most`."""
        if value is None or self.least is None or self.least <= value <= (self.most or math.inf):
            return
        bounds = f"at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
        raise ConfigError(f"{self.spelled} {value} must be {bounds}.")


NO_HINTS: Mapping[str, str] = {}


def read_flags(
    arguments: Sequence[str], flags: Iterable[Flag], positional: Sequence[str] = (), hints: Mapping[str, str] = NO_HINTS
) -> dict[str, Any]:
    """Parsed arguments, by name, as text (a list of texts for list flags, True or False for bare switches).

    `positional` names the arguments without a flag, in order; one that is a list flag takes all that are left. Raises ConfigError
    for unknown flags, each with its sentence in `hints` or the nearest name, and for a value that is given by place and by its flag.
    Of a flag that is there twice the last counts, as in other programs, with a warning.
    """
    by_name = {flag.name: flag for flag in flags}
    parsed: dict[str, Any] = {}
    placed: dict[str, str] = {}
    unknown: dict[str, str] = {}
    free = list(positional)
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word.startswith("-") and word != "-" and not _NUMBER.match(word):
            _take_flag(word, rest, by_name, parsed, unknown)
        elif free and free[0] in by_name and by_name[free[0]].is_list:
            parsed[free[0]] = [*parsed.get(free[0], []), word]
        elif free:
            placed[free.pop(0)] = word
        else:
            takes = [flag.name for flag in by_name.values() if not flag.is_switch]
            like = [
                f", such as {by_name[name].spelled} {word}"
                for name in ("output_dir", "output", *takes)
                if name in by_name
            ]
            raise ConfigError(f"{word!r} follows no flag; every value needs one{like[0] if like else ''}.")
    _refuse_unknown(unknown, by_name, hints)
    for name, word in placed.items():
        if parsed.setdefault(name, word) != word:
            raise ConfigError(
                f"{word} and {by_name[name].spelled} {parsed[name]} are two values of one option; give one."
            )
    return parsed


def _take_flag(
    word: str, rest: list[str], by_name: Mapping[str, Flag], parsed: dict[str, Any], unknown: dict[str, str]
) -> None:
    spelled, is_assigned, assigned = word.partition("=")
    spelled = {f"-{flag.short}": flag.spelled for flag in by_name.values() if flag.short}.get(spelled, spelled)
    name = spelled.lstrip("-").replace("-", "_")
    negated = name.removeprefix("no_")
    if name not in by_name and negated in by_name and by_name[negated].is_switch and not is_assigned:
        parsed[negated] = False
        return
    if not spelled.startswith("--") or name not in by_name:
        unknown[name] = spelled
        _following(rest)
        return
    flag, former = by_name[name], parsed.get(name)
    if flag.is_list:
        values = [assigned] if is_assigned else _following(rest)
        if not values:
            raise ConfigError(f"{flag.spelled} needs a value.")
        parsed[name] = [*parsed.get(name, []), *values]
    elif is_assigned:
        parsed[name] = assigned
    elif flag.is_switch:
        parsed[name] = rest.pop(0) if rest and rest[0].lower() in _YES_NO else True
    elif rest and not _is_flag(rest[0]):
        parsed[name] = rest.pop(0)
    elif flag.bare:
        parsed[name] = flag.bare
    else:
        raise ConfigError(f"{flag.spelled} needs a value.")
    if former not in (None, parsed[name]) and not flag.is_list:
        shown = mask([parsed[name], former], name)
        logger.warning("%s is there twice: %s counts, and %s does not.", flag.spelled, *shown)


def _is_flag(word: str) -> bool:
    return word.startswith("--") or (word.startswith("-") and len(word) == 2 and not _NUMBER.match(word))


def _following(rest: list[str]) -> list[str]:
    values = []
    while rest and not _is_flag(rest[0]):
        values.append(rest.pop(0))
    return values


def _refuse_unknown(unknown: Mapping[str, str], by_name: Mapping[str, Flag], hints: Mapping[str, str]) -> None:
    as_flag = lambda sentence: re.sub(r"\w+(?=\?$)", lambda word: spelled(word[0]), sentence)
    near = {name: f" {hints[name]}" if name in hints else as_flag(did_you_mean(name, by_name)) for name in unknown}
    if unknown:
        sentences = [f"{shown} is not an option here.{near[name]}" for name, shown in unknown.items()]
        raise ConfigError(" ".join(sentences) + ("" if all(near.values()) else " --help-all shows every option."))


def read_yaml(path: str | Path, flags: Iterable[Flag], hints: Mapping[str, str] = NO_HINTS) -> dict[str, Any]:
    """Options from a YAML file, by name. Raises ConfigError naming the file, the key and the nearest name."""
    import yaml

    node, content = yaml_of(read_text(path), str(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}; it must hold options, one `name: value` a line.")
    allowed = {flag.name for flag in flags}
    assert isinstance(node, yaml.MappingNode)  # it became a dict
    written = [str(key.value).replace("-", "_") for key, _ in node.value]
    hint = lambda name: f" {hints[name]}" if name in hints else did_you_mean(name, allowed)
    if unknown := [f"{name} is not an option here.{hint(name)}" for name in written if name not in allowed]:
        raise ConfigError(f"{path}: {' '.join(unknown)}")
    for name in written:
        if written.count(name) > 1:
            raise ConfigError(f"{path}: {name} is there twice; keep one.")
    values = {str(name).replace("-", "_"): value for name, value in content.items()}
    texts = {flag.name for flag in flags if flag.bare}  # `fsdp: true` is `--fsdp true`
    return {
        name: str(value).lower() if name in texts and isinstance(value, bool) else value
        for name, value in values.items()
    }


def typed(raw: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """The same options with values of their types. Raises ConfigError for a value that is not of its type."""
    from jsonargparse import ArgumentError, ArgumentParser

    values: dict[str, Any] = {}
    for name, value in raw.items():
        if isinstance(value, str) and json_depth(value.encode(errors="replace")) > MOST_DEPTH:
            raise ConfigError(f"{name} is nested more than {MOST_DEPTH} deep.")
        texts = list(value) if isinstance(value, list) else [value]  # before the parser changes them in place
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument(f"--{name}", type=types[name])
        try:
            values[name] = parser.parse_object({name: _as_list(_split_list(value), types[name])}, defaults=False)[name]
        except (ArgumentError, ValueError, TypeError, OverflowError, RecursionError) as error:
            shown = value if isinstance(value, str) else repr(value)
            shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
            raise ConfigError(f"{name}={shown} cannot be read as {describe(types[name])}.") from error
        results = values[name] if isinstance(value, list) else [values[name]]
        for text, read in zip(texts, results or (), strict=False):  # a text that was read as YAML
            if isinstance(text, str) and not isinstance(read, str) and re.match(r"\s*([\[{]|[-+\d]+:)", text):
                refuse_odd_numbers(text, name)
    return values


def _as_list(value: Any, kind: Any) -> Any:
    """Wrap a single value in a list where the type is a list: `reward: math`."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    wants_list = any(get_origin(alternative) is list for alternative in kinds) and str not in kinds and Any not in kinds
    is_one = value is not None and not isinstance(value, list | tuple | Mapping)
    return [value] if wants_list and is_one and str(value).lower() not in ("null", "none", "~") else value


def _split_list(value: Any) -> Any:
    """`--reward-weights "[1, 0.1]"` is one text that holds the whole list."""
    if isinstance(value, list) and len(value) == 1 and str(value[0]).startswith("["):
        try:
            return yaml_of(str(value[0]), "the list")[1]
        except ConfigError:  # not a list after all; the type will say so
            return value
    return value


def describe(kind: Any) -> str:
    """A type in words: `int | None` is "a whole number or null"."""
    text = (
        kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind)) if isinstance(kind, type) else str(kind)
    )
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "None": "null"}
    parts = [part.strip() for part in text.replace("typing.", "").split("|")]
    phrases = [
        words.get(part, "a list" if "list" in part else "a mapping" if "dict" in part else part) for part in parts
    ]
    return " or ".join(dict.fromkeys(phrases))
