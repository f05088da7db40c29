"""Positions in packed rows `[prompt | c1 | ... | cG]`, and attention of the learner by PyTorch's operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Positions of one prompt and its completions in a packed row."""

    start: int
    length: int
    """Tokens of the prompt."""
    counts: tuple[int, ...]
    """Tokens of each completion; completions follow the prompt without gaps."""

    @property
    def prompt(self) -> slice:
        return slice(self.start, self.start + self.length)

    @property
    def answers(self) -> slice:
        return slice(self.start + self.length, self.start + self.length + sum(self.counts))

    def each_answer(self) -> list[slice]:
        """Slices of all non-empty completions."""
        places, first = [], self.start + self.length
        for count in self.counts:
            if count:
                places.append(slice(first, first + count))
            first += count
        return places


@dataclass(frozen=True, eq=False)
class AttentionProduct:
    """Attention of some queries to some keys: SDPA, or explicit softmax attention with capped scores or sinks."""

    scale: float | None
    dropout: float
    softcap: float | None
    sinks: Tensor | None
    """[H]"""

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[B, H, T, E] from `query` [B, H, T, D], `key` [B, K, S, D] and `value` [B, K, S, E].

        `mask` is boolean and broadcasts to [B, H, T, S]; without it attention is causal, the last query seeing every key.
        """
        repeats = query.shape[1] // key.shape[1]
        if self.is_plain:
            options: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": repeats > 1}
            return F.scaled_dot_product_attention(
                query, key, value, dropout_p=self.dropout, scale=self.scale, **options
            )
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = query @ key.mT * scale
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh() * self.softcap
        if mask is None:
            mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril(
                key.shape[2] - query.shape[2]
            )
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)  # finite: a padding row may be all masked
        if self.sinks is not None:
            sinks = self.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))[..., : key.shape[2]]
        return F.dropout(weights, self.dropout).to(value.dtype) @ value
