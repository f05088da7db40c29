"""Advantages around another one."""

from __future__ import annotations

from torch import Tensor

from covey.types import Advantage


class Wrapping:
    """Base of an advantage around another, `advantage`, whose needs and exemptions are its own."""

    advantage: Advantage

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(getattr(self.advantage, "needs", ()))

    @property
    def exempt(self) -> tuple[str, ...]:
        return tuple(getattr(self.advantage, "exempt", ()))


def zeroed(judged: Tensor, completions: Tensor) -> Tensor:
    """Advantages [P, G] or [P, G, T], 0 for the `completions` [P, G] that are True."""
    return judged.masked_fill(completions if judged.ndim == 2 else completions.unsqueeze(-1), 0.0)
