"""Attention of packed rows by PyTorch's operations: of each prompt by itself, and of its completions padded to one length."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from covey.kernels import CHOICE, AttentionProduct, Layout, Window, is_chosen
from covey.process.device import onto


@dataclass(frozen=True, eq=False)
class Segment:
    """One prompt and its G completions inside a packed row of S tokens."""

    layout: Layout
    """Positions of the prompt, and the number of predicting tokens (all but the last) of each completion."""
    device: torch.device

    @functools.cached_property
    def index(self) -> Tensor:
        """[G, T] index in the packed row of each predicting completion token; any valid index beyond a completion's end."""
        begins = self.layout.answers.start + self._counts.cumsum(0) - self._counts
        index: Tensor = begins[:, None] + self._steps
        return index.masked_fill(~self.valid, self.layout.start)

    @functools.cached_property
    def valid(self) -> Tensor:
        """[G, T] bool"""
        return self._steps < self._counts[:, None]

    def mask(self, window: Window | None, seen: Tensor | None = None) -> Tensor:
        """[T, length + T] bool: a completion token sees the prompt, and its own completion up to itself, in its window.

        With `seen` [S, positions] of the packed row's tokens [G, 1, T, length + T], of these positions alone.
        """
        mask = self._masked(self.layout.length, len(self._steps), window)
        return mask if seen is None else mask & seen[self.index, : mask.shape[1]][:, None]

    def prompt_mask(self, window: Window | None, seen: Tensor | None = None) -> Tensor | None:
        """[length, length] bool of the prompt's tokens, of which `seen` is read as by `mask`; None if it is plainly causal."""
        length = self.layout.length
        if seen is not None:
            return self._masked(0, length, window) & seen[self.layout.prompt, :length]
        return None if window is None or not window.hides(length) else self._masked(0, length, window)

    def _masked(self, before: int, count: int, window: Window | None) -> Tensor:
        """[count, before + count] bool of the tokens from position `before` on; cached for later layers."""
        mask = self._masks.get((before, window))
        if mask is None:
            key = torch.arange(before + count, device=self.device)
            query = key[before:, None]
            mask = key <= query if window is None else (key <= query) & (key >= window.first(query))
            self._masks[before, window] = mask
        return mask

    @functools.cached_property
    def _masks(self) -> dict[tuple[int, Window | None], Tensor]:
        return {}

    @functools.cached_property
    def written(self) -> Tensor:
        """[sum T_i] flat indices where `valid` is true: indexing by a mask would synchronize with the device in each layer."""
        longest = len(self._steps)
        return onto(self.device, numbers_of([(i * longest, count) for i, count in enumerate(self.layout.counts)]))

    @functools.cached_property
    def _counts(self) -> Tensor:
        return onto(self.device, torch.tensor(self.layout.counts, dtype=torch.long))

    @functools.cached_property
    def _steps(self) -> Tensor:
        return torch.arange(max(self.layout.counts, default=0), device=self.device)


Run = tuple[int, int]
"""(first number, count) of consecutive numbers."""


def numbers_of(runs: Sequence[Run]) -> Tensor:
    """[sum of all counts] int64, the concatenated numbers of these runs."""
    firsts, counts = torch.tensor(runs, dtype=torch.long).T
    before = counts.cumsum(0) - counts
    numbers: Tensor = torch.arange(int(counts.sum())) + (firsts - before).repeat_interleave(counts)
    return numbers


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment: Segment,
    window: Window | None,
    product: AttentionProduct,
    seen: Tensor | None,
) -> list[Tensor]:
    """[length, H, D] of the prompt's tokens and [sum T_i, H, D] of the completions', from [H, S, D].

    `seen` [S, positions] is true at the positions that a token's indexer chose.
    """
    prompt_of = lambda x: x[:, segment.layout.prompt][None]  # [1, H, length, D]
    prompt_mask = segment.prompt_mask(window, seen)
    prompt = product(prompt_of(query), prompt_of(key), prompt_of(value), prompt_mask)
    count, longest = segment.index.shape
    if not segment.index.numel():
        return [prompt[0].transpose(0, 1)]
    flat = segment.index.flatten()
    pick = lambda x: x[:, flat].view(x.shape[0], count, longest, x.shape[2]).transpose(0, 1)  # [G, H, T, D]
    keys = torch.cat([prompt_of(key).expand(count, -1, -1, -1), pick(key)], dim=2)
    values = torch.cat([prompt_of(value).expand(count, -1, -1, -1), pick(value)], dim=2)
    answers = product(pick(query), keys, values, segment.mask(window, seen))
    return [prompt[0].transpose(0, 1), answers.transpose(1, 2).flatten(0, 1)[segment.written]]


def attend_unpacked(
    module: nn.Module,
    projected: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    product: AttentionProduct,
    options: Mapping[str, Any],
) -> tuple[Tensor, None]:
    """Attention without packed rows: SDPA with SDPA's mask, or explicit softmax attention if scores are capped or have sinks.

    `projected`: query, key and value; `options`: keywords of transformers' interface.
    """
    query, key, value = projected
    chosen = options.get(CHOICE)
    if chosen is not None and mask is not None:
        mask = mask & is_chosen(chosen, key.shape[2])[:, None]
    if not product.is_plain:
        return product(query, key, value, mask).transpose(1, 2).contiguous(), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    out, _ = sdpa_attention_forward(
        module, query, key, value, mask, dropout=product.dropout, scaling=product.scale, **options
    )
    return out, None
