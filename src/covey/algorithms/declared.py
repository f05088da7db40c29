"""Values of an algorithm's parts against their declared types: a word that is none of a Literal's, a text in the place of a number."""

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Integral
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from covey.errors import ConfigError, did_you_mean
from covey.types import Scores, TokenBatch

_WORDS = {float: "a number", int: "a whole number", bool: "True or False", str: "a text", type(None): "None"}


def expect_declared(part: Any) -> None:
    """Raise ConfigError where a field of a part, or of a part within it, has a value that its annotation rules out.

    Fields of other types than numbers, words, texts and None are not looked at.
    """
    if not is_dataclass(part) or isinstance(part, type):
        return
    for name, kinds in _declared(type(part)):
        value = getattr(part, name)
        if is_dataclass(value):
            expect_declared(value)
        elif not any(_fits(value, kind) for kind in kinds):
            allowed = [word for kind in kinds for word in _words(kind)]
            listed = " or ".join([", ".join(allowed[:-1]), allowed[-1]] if len(allowed) > 1 else allowed)
            words = [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
            raise ConfigError(
                f"{type(part).__name__}'s {name}={value!r} must be {listed}.{did_you_mean(str(value), words)}"
            )


@cache
def _declared(cls: type) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Names of a dataclass's fields, each with the members of its annotation; none where annotations cannot be read."""
    try:
        hints = get_type_hints(cls)
    except (NameError, TypeError, AttributeError):
        return ()
    return tuple((item.name, _members(hints[item.name])) for item in fields(cls) if item.init)


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return any(value is word or (isinstance(value, type(word)) and value == word) for word in get_args(kind))
    if kind is float:
        return hasattr(value, "__float__") and not isinstance(value, bool) and float(value) == float(value)
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind in (bool, str, type(None)):
        return isinstance(value, kind)
    return not isinstance(value, (str, bool)) or kind is Any


def _words(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return [repr(word) for word in get_args(kind)]
    return [_WORDS.get(kind, f"a {getattr(kind, '__name__', kind)}")]


def expect_parts(parts: Mapping[str, Any]) -> None:
    """Raise ConfigError for a part of an algorithm, by its slot (`weights.0`), that cannot be called or has a value of another type."""
    for place, part in parts.items():
        slot = place.partition(".")[0]
        if slot not in ("kl", "critic", "teacher"):
            expect_callable(slot, part)
    critic = parts.get("critic")
    if critic is not None and not callable(getattr(critic, "loss", None)):
        raise ConfigError(f"critic={critic!r} has no loss(tokens, totals); use alg.Critic(error=your_function).")
    for part in parts.values():
        expect_declared(part)


def expect_callable(slot: str, part: Any) -> None:
    """Raise ConfigError for a part that is a class or no function."""
    if isinstance(part, type):
        raise ConfigError(f"{slot}={part.__name__} is a class; give an instance: {part.__name__}().")
    if not callable(part):
        raise ConfigError(f"{slot}={part!r} is not callable; give a function or an instance with __call__.")


def expect_advantages(part: Any, value: Any, scores: Scores) -> None:
    """Raise ValueError unless an advantage returned [P, G] or [P, G, T]."""
    allowed = (tuple(scores.mask.shape[:2]), tuple(scores.mask.shape))
    if not isinstance(value, Tensor) or tuple(value.shape) not in allowed:
        raise ValueError(
            f"{_title(part)} (advantage) returned {_shape(value)}; it must return [P, G] = {list(allowed[0])} or "
            f"[P, G, T] = {list(allowed[1])}."
        )


def expect_per_token(part: Any, kind: str, value: Any, tokens: TokenBatch) -> Tensor:
    """`value`, if it is [N, T] or [N, 1]; else ValueError."""
    rows, width = tokens.mask.shape
    if isinstance(value, Tensor) and tuple(value.shape) in ((rows, width), (rows, 1)):
        return value
    raise ValueError(
        f"{_title(part)} ({kind}) returned {_shape(value)}; it must return one value a token, [N, T] = [{rows}, {width}], "
        f"or one a sequence, [N, 1] = [{rows}, 1], and no mean: the library divides by totals of the whole step."
    )


def _shape(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _title(part: Any) -> str:
    return getattr(part, "__name__", type(part).__name__)
