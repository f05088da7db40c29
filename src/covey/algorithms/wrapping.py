"""Advantages around another one."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from covey.types import Advantage, Scores


class Wrapping:
    """Base of an advantage around another, `advantage`, whose needs and exemptions are its own."""

    advantage: Advantage

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(getattr(self.advantage, "needs", ()))

    @property
    def exempt(self) -> tuple[str, ...]:
        return tuple(getattr(self.advantage, "exempt", ()))

    @property
    def column(self) -> str | None:
        return getattr(self.advantage, "column", None)

    def inner(self, scores: Scores) -> Scores:
        """The scores that the inner advantage judges."""
        return scores

    def recalled(self, memory: Mapping[str, float]) -> Any:
        """The part around the inner advantage with its memory of earlier rollouts."""
        return replace(self, advantage=recalled(self.advantage, memory))  # type: ignore[type-var]

    def remembered(self, scores: Scores) -> dict[str, float]:
        """The inner advantage's memory after these completions."""
        return remembered(self.advantage, self.inner(scores))


def recalled(advantage: Any, memory: Mapping[str, float]) -> Any:
    """The advantage with its memory of earlier rollouts, where it has one."""
    recall = getattr(advantage, "recalled", None)
    return recall(memory) if callable(recall) else advantage


def remembered(advantage: Any, scores: Scores) -> dict[str, float]:
    """An advantage's memory after these completions; empty where it has none."""
    remember = getattr(advantage, "remembered", None)
    return dict(remember(scores)) if callable(remember) else {}


def zeroed(judged: Tensor, completions: Tensor) -> Tensor:
    """Advantages [P, G] or [P, G, T], 0 for the `completions` [P, G] that are True."""
    return judged.masked_fill(completions if judged.ndim == 2 else completions.unsqueeze(-1), 0.0)
