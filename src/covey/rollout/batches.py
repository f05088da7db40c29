"""Batches of a forward pass over the KV cache: a decode step of the running rows, and a prefill of prompts."""

import functools
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covey.kernels import Layout
from covey.rollout import row_keys
from covey.rollout.attention import causal
from covey.rollout.kv_cache import KVCache, rounded
from covey.rollout.row_keys import Order
from covey.rollout.softmax_attention import ScoreRule


def token_indices(lengths: Sequence[int], width: int) -> Tensor:
    """[M] int64, flat indices of the tokens of rows of these lengths among rows padded to `width`."""
    return torch.cat([torch.arange(length) + row * width for row, length in enumerate(lengths)])


@dataclass(frozen=True, eq=False)
class DecodeBatch:
    """Batch of a decode step: one new token for each running row."""

    cache: KVCache

    def states(self) -> AbstractContextManager[Any]:
        """Context with transformers' cache of the rows' states."""
        assert self.cache.states is not None
        return self.cache.states.decoding(self.cache.num_computed)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
        """[R, 1, Hq, D]; see `Batch`."""
        out = self.cache.attend_decode(layer, query[:, :, 0], key[:, :, 0], value[:, :, 0], rule)
        return out[:, None]

    def index_keys(self, layer: int, keys: Tensor) -> Tensor:
        """[R, K, D] keys from which a layer's indexer chooses, after the new `keys` [R, 1, D], which the cache keeps too."""
        return row_keys.index_keys(self.cache, layer, keys[:, 0])

    def visible_keys(self, length: int) -> Tensor:
        """[R, 1, 1, K] bool, true at those of `index_keys` that a row sees."""
        return row_keys.visible_keys(self.cache)[:, None, None]

    def whole_keys(self, layer: int, new: Sequence[Tensor], order: Order) -> tuple[Tensor, ...]:
        """All keys, or values, of each row in `order`, after the `new` ones [R, H, 1, D], which the cache keeps too."""
        return row_keys.whole_keys(self.cache, layer, [x[:, :, 0] for x in new], order)

    def whole_mask(self, length: int, order: Order) -> Tensor:
        """The mask of `whole_keys`: [R, K] by "end", as transformers' `generate` has it, or [R, 1, 1, K] bool."""
        is_key = row_keys.key_places(self.cache, order) >= 0
        return is_key.long() if order == "end" else is_key[:, None, None]

    @property
    def past(self) -> int:
        """Keys of the longest row before this step."""
        return row_keys.key_places(self.cache, "end").shape[1] - 1

    def past_positions(self, lead: Sequence[int]) -> Tensor | None:
        """[*lead, R, past] positions of the keys before this step, in the order "end"."""
        places = row_keys.key_places(self.cache, "end")
        return ((places >= 0).cumsum(-1) - 1).clamp(min=0)[:, :-1].expand(*lead, -1, -1)


@dataclass(frozen=True, eq=False)
class PrefillBatch:
    """Batch of a prefill into these slots: prompts padded on the right, or concatenated."""

    cache: KVCache
    slots: range

    def states(self) -> AbstractContextManager[Any]:
        """Context with a new cache of transformers for the states of these prompts, all of one length."""
        assert self.cache.states is not None
        return self.cache.states.prefilling(self.slots)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each of these prompts."""
        return self.cache.prompt_lengths[self.slots.start : self.slots.stop]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
        """[A, L, Hq, D]; see `Batch`."""
        self._keep(layer, key, value)
        rule = rule.among(key.shape[2])
        prompts, _, length, _ = query.shape
        window = self.cache.layers[layer].window_within(max(self.lengths))
        if self.cache.kernels is not None and rule.is_plain and window is None:
            layouts = [Layout(p * length, length, ()) for p in range(prompts)]
            row = (x.transpose(0, 1).flatten(1, 2) for x in (query, key, value))  # each [H, A * L, D]
            out = self._by_kernels(*row, layouts=layouts, scale=rule.scale)
            if out is not None:
                padded: Tensor = out.transpose(0, 1).unflatten(0, (prompts, length))
                return padded
        return causal(query, key, value, rule, window)

    def index_keys(self, layer: int, keys: Tensor) -> Tensor:
        """The `keys` [A, L, D] of an indexer, which the cache keeps."""
        self._keep(row_keys.index_place(self.cache, layer), keys[:, None], keys[:, None])
        return keys

    def visible_keys(self, length: int) -> Tensor:
        """[1, 1, L, L] bool, true at those of `index_keys` that a token sees."""
        return torch.ones(1, 1, length, length, dtype=torch.bool, device=self.cache.device).tril_()

    def whole_keys(self, layer: int, new: Sequence[Tensor], order: Order) -> tuple[Tensor, ...]:
        """The `new` keys, or keys and values, [A, H, L, D], which the cache keeps."""
        for kind, x in enumerate(new):
            self.cache.prefix[layer][kind, self.slots.start : self.slots.stop, :, : x.shape[2], : x.shape[3]] = x
        return tuple(new)

    def whole_mask(self, length: int, order: Order) -> Tensor:
        """The mask of `whole_keys`: [A, L] by "end", or [A, 1, L, L] bool."""
        if order == "position":
            return self.visible_keys(length).expand(len(self.lengths), -1, -1, -1)
        ends = torch.tensor(self.lengths, device=self.cache.device)[:, None]
        return (torch.arange(length, device=self.cache.device) < ends).long()

    past = 0

    def past_positions(self, lead: Sequence[int]) -> Tensor | None:
        """None: no key is before these."""
        return None

    def attend_end_to_end(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[M, Hq, D] from `query` [M, Hq, D], `key` and `value` [M, Hkv, D] of the concatenated prompts.

        Padding after the last prompt gets zeros.
        """
        count = sum(self.lengths)
        beyond = len(query) - count
        query, key, value = query[:count], key[:count], value[:count]
        row = [x.transpose(0, 1) for x in (query, key, value)]  # each [H, M, D]
        window = self.cache.layers[layer].window_within(max(self.lengths))
        output = None if window else self._by_kernels(*row, layouts=self._layouts, scale=scale)
        if output is not None:
            self.keep_end_to_end(layer, key, value)
            out = output.transpose(0, 1)
        else:
            query, key, value = map(self._padded, (query, key, value))
            self._keep(layer, key, value)
            out = causal(query, key, value, ScoreRule(scale), window).flatten(0, 1)[self._token_indices]
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, beyond)) if beyond else out

    def keep_end_to_end(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store `key` and `value` [M, Hkv, D]; prefill needs nothing else of the last layer."""
        count, start = sum(self.lengths), 0
        if self.cache.device.type != "cpu":  # one call costs less than a loop over prompts
            self._keep(layer, self._padded(key[:count]), self._padded(value[:count]))
            return
        for slot, length in zip(self.slots, self.lengths, strict=True):
            for kind, x in enumerate((key, value)):
                self.cache.prefix[layer][kind, slot, :, :length] = x[start : start + length].transpose(0, 1)
            start += length

    def _keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store `key` and `value` [A, Hkv, L, D] of padded prompts."""
        buffer = self.cache.prefix[layer][:, self.slots.start : self.slots.stop, :, : key.shape[2]]
        buffer[0], buffer[1] = key, value

    @functools.cached_property
    def _layouts(self) -> tuple[Layout, ...]:
        starts = itertools.accumulate(self.lengths[:-1], initial=0)
        return tuple(Layout(start, length, ()) for start, length in zip(starts, self.lengths, strict=True) if length)

    @functools.cached_property
    def _width(self) -> int:
        """Tokens of a padded prompt."""
        return min(rounded(max(self.lengths)), self.cache.context)

    @functools.cached_property
    def _token_indices(self) -> Tensor:
        """Flat index of each token among the padded prompts."""
        return token_indices(self.lengths, self._width).to(self.cache.device)

    def _padded(self, x: Tensor) -> Tensor:
        """[A, H, L, D] from [M, H, D]."""
        out = x.new_zeros(len(self.lengths) * self._width, *x.shape[1:])
        out[self._token_indices] = x
        padded: Tensor = out.unflatten(0, (len(self.lengths), self._width)).transpose(1, 2)
        return padded

    def _by_kernels(
        self, query: Tensor, key: Tensor, value: Tensor, *, layouts: Sequence[Layout], scale: float
    ) -> Tensor | None:
        """[Hq, S, D] from `query` [Hq, S, D], `key` and `value` [Hkv, S, D]; None where the kernels do not run."""
        if self.cache.kernels is None or not layouts or not query.dtype == key.dtype == value.dtype:
            return None
        return self.cache.kernels.prefill(query, key, value, layouts, scale)


@dataclass(frozen=True, eq=False)
class AnswerBatch:
    """Batch of a prefill of answers: further tokens of running rows, padded on the right, or concatenated.

    `extend_rows` has made room for them.
    """

    cache: KVCache
    rows: Sequence[int]
    lengths: Sequence[int]
    """Tokens of each of these rows."""

    def states(self) -> AbstractContextManager[Any]:
        """Context with transformers' cache of the states of these rows, whose answers are of one length."""
        assert self.cache.states is not None
        return self.cache.states.extending(self.rows)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
        """[A, L, Hq, D]; see `Batch`."""
        out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], query.shape[3])
        for a, (row, length) in enumerate(zip(self.rows, self.lengths, strict=True)):
            self._keep(layer, row, key[a, :, :length], value[a, :, :length])
            out[a, :length] = self._attended(layer, row, query[a, :, :length], rule)
        return out

    def attend_end_to_end(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[M, Hq, D] from `query` [M, Hq, D], `key` and `value` [M, Hkv, D] of the concatenated answers; zeros for padding."""
        self.keep_end_to_end(layer, key, value)
        out, start = torch.zeros_like(query), 0
        for row, length in zip(self.rows, self.lengths, strict=True):
            place = slice(start, start + length)
            out[place] = self._attended(layer, row, query[place].transpose(0, 1), ScoreRule(scale))
            start += length
        return out

    def keep_end_to_end(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store `key` and `value` [M, Hkv, D]; prefill needs nothing else of the last layer."""
        start = 0
        for row, length in zip(self.rows, self.lengths, strict=True):
            place = slice(start, start + length)
            self._keep(layer, row, key[place].transpose(0, 1), value[place].transpose(0, 1))
            start += length

    def _keep(self, layer: int, row: int, key: Tensor, value: Tensor) -> None:
        """Store `key` and `value` [Hkv, L, D] in the row's last columns."""
        columns = slice(self.cache.step_column - key.shape[1], self.cache.step_column)
        keys, values = self.cache.suffix[layer]
        keys[row, :, columns], values[row, :, columns] = key, value

    def _attended(self, layer: int, row: int, query: Tensor, rule: ScoreRule) -> Tensor:
        """[L, Hq, D] from `query` [Hq, L, D] of the row's last tokens, whose keys are stored."""
        keys, values = row_keys.keys_of(self.cache, layer, row)
        window = self.cache.layers[layer].window_within(keys.shape[1])
        out = causal(query[None], keys[None], values[None], rule, window)
        return out[0]
