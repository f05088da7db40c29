"""Declaration of an option: its sentence, its group in the help, its words or range, or why it does not act. Light to import."""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, field, replace
from typing import Any

from covey.declared import Range
from covey.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Option(Range):
    """Everything about an option but its name, type and default."""

    help: str = ""
    """One sentence."""
    group: str = ""
    """Group in `--help-all`; "" where the option has no effect."""
    words: tuple[str, ...] = ()
    """Accepted words; empty: any value of its type."""
    is_whole: bool = False
    bare: str = ""
    """Value of the flag without one on the command line; "": it needs one."""
    is_optional: bool = False
    """None is a value. Both follow from the type where the option is a field of `Options`."""
    also: tuple[Any, ...] = ()
    """Values in addition to the words or the numbers."""
    inert: str = ""
    """Reason why no value changes results: accepted, and named once where it differs from the default."""
    is_silent: bool = False
    """Inert, and not even named."""
    refused: str = ""
    """Reason why only the default can be honoured, and the alternative."""

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError, in one sentence, for a value that is none of the words or outside of the range."""
        value = getattr(value, "value", value)  # of an enumeration
        if any(type(value) is type(word) and value == word for word in self.also) or (
            value is None and self.is_optional
        ):
            return
        if self.words and value not in self.words:
            hint = did_you_mean(str(value), self.words) or f" It is one of {', '.join(self.words)}."
            raise ConfigError(f"{name}={value!r} is not known.{hint}")
        if self.range:
            self._check_number(name, value)

    def _check_number(self, name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            more = [str(word) for word in self.also] + (["null"] if self.also and self.is_optional else [])
            raise ConfigError(f"{name}={value!r} must be a number{''.join(f' or {word}' for word in more)}.")
        self.expect(name, value)
        if self.is_whole and value % 1:
            raise ConfigError(f"{name}={value!r} must be a whole number.")


def option(default: Any, help: str = "", **declared: Any) -> Any:
    """A dataclass field with this default, declared as `Option(help, **declared)`."""
    sentence = _Sentence(help)
    sentence.declared = Option(help, **declared)
    return field(default=default, metadata={"help": sentence})


def declaration_of(item: Field[Any]) -> Option | None:
    """The declaration of a field made by `option`, completed from its annotation: whole numbers, and None as a value."""
    sentence = item.metadata.get("help")
    if not isinstance(sentence, _Sentence):
        return None
    kinds = [kind.strip() for kind in str(item.type).split("|")]
    return replace(sentence.declared, is_whole="int" in kinds and "float" not in kinds, is_optional="None" in kinds)


class _Sentence(str):
    """A field's help, which carries the declaration: `HfArgumentParser` hands all other metadata to argparse."""

    declared: Option
