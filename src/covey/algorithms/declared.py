"""Parts of an algorithm, and what they return, against the slot that holds them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from covey.declared import expect_declared
from covey.errors import ConfigError
from covey.types import Scores, TokenBatch


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
