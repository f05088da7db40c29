"""Additive attention mask of a decode step: 0 for a visible key, `HIDDEN` for a masked one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from covey.rollout.attention import HIDDEN, wide


@dataclass(frozen=True, eq=False)
class KeyBias:
    """Biases of P prompts' keys and of R rows' own keys, also repeated for each head, by number of heads."""

    prefix: Tensor
    """[P, columns]"""
    suffix: Tensor
    """[R, columns]"""
    wide_prefix: dict[int, Tensor]
    """[P * H, 1, columns] by H, filled on first use."""
    wide_suffix: dict[int, Tensor]
    """[R * H, 1, columns] by H, filled on first use."""

    def before_hidden(self, first_of_prompts: Tensor, first_of_rows: Tensor) -> KeyBias:
        """A copy with the columns before `first_of_prompts` [P] and `first_of_rows` [R or more] hidden too."""
        rows = first_of_rows[: len(self.suffix)]
        return KeyBias(_hidden_before(self.prefix, first_of_prompts), _hidden_before(self.suffix, rows), {}, {})

    def prefix_by_head(self, heads: int) -> Tensor:
        return _by_head(self.wide_prefix, self.prefix, heads)

    def suffix_by_head(self, heads: int) -> Tensor:
        return _by_head(self.wide_suffix, self.suffix, heads)


def _by_head(cache: dict[int, Tensor], bias: Tensor, heads: int) -> Tensor:
    if heads not in cache:
        cache[heads] = wide(bias, heads)
    return cache[heads]


def _hidden_before(bias: Tensor, first: Tensor) -> Tensor:
    """`bias` [B, K] with the columns before `first` [B] hidden too."""
    column = torch.arange(bias.shape[1], device=bias.device)
    return bias.masked_fill(column < first[:, None], HIDDEN)
