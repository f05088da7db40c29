"""Declaration of an option: its sentence, its group in the help, its words or range, or why it does not act. Light to import."""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, field, replace
from typing import Any

from covey.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Option:
    """Everything about an option but its name, type and default."""

    help: str = ""
    """One sentence."""
    group: str = ""
    """Group in `--help-all`; "" where the option has no effect."""
    words: tuple[str, ...] = ()
    """Accepted words; empty: any value of its type."""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    may_be_infinite: bool = False
    """An infinite number is no limit. Elsewhere it would end in NaN."""
    is_whole: bool = False
    bare: str = ""
    """Value of the flag without one on the command line; "": it needs one."""
    is_optional: bool = False
    """None is a value. Both follow from the type where the option is a field of `Options`."""
    also: tuple[Any, ...] = ()
    """Values in addition to the words or the numbers."""
    why: str = ""
    """A second sentence for a number out of range."""
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
        if math.isinf(value) and (self.is_whole or not self.may_be_infinite) and value > 0:
            raise ConfigError(f"{name}={value!r} must be finite.")
        if self.is_whole and value % 1:
            raise ConfigError(f"{name}={value!r} must be a whole number.")
        low, high = self.at_least, self.at_most
        is_inside = (low is None or value >= low) and (high is None or value <= high)
        is_inside = is_inside and (self.above is None or value > self.above)
        if not (is_inside and (self.below is None or value < self.below)):
            why = f" {self.why}" if self.why else ""
            raise ConfigError(f"{name}={value!r} must be {self.range}.{why}")

    @property
    def range(self) -> str:
        """The range in words; "" for an option without one."""
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(
            f"{words} {bound:g}" if bound != 2**32 - 1 else f"{words} {bound}"
            for words, bound in bounds.items()
            if bound is not None
        )


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
