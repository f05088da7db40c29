"""Attention with an explicit softmax: capped scores, sinks, chosen keys, windows, and the two parts of a decode step.

A decode step without kernels of its own attends in two parts, merged exactly: keys of a group's prompt, shared, and each
completion's own keys. The queries of all completions of a group are rows of one product with the prompt's keys, which are stored and
read once (Hydragen, Juravsky et al. 2024). The scores of both are concatenated for one softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from covey.kernels import Window, is_chosen

HIDDEN = -3e4
"""Bias of a masked key: finite in every precision, so that a softmax over masked keys alone is not NaN."""


class ScoreRule(NamedTuple):
    """Attention scores: the rule by which the score s of a query and a key is computed."""

    scale: float
    """Factor of their product."""
    softcap: float | None = None
    """c turns s into c tanh(s / c)."""
    sinks: Tensor | None = None
    """[Hq] scores of a further key without value in every softmax."""
    chosen: Tensor | None = None
    """[B, L, k] places of the keys that each query sees; None: all."""

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None and self.chosen is None

    def among(self, keys: int) -> ScoreRule:
        """The rule among so many keys: a choice of them all is none."""
        return self if self.chosen is None or self.chosen.shape[-1] < keys else self._replace(chosen=None)


QUERY_BLOCK = 128
"""Queries of a prompt computed together; keys after the block are skipped."""


def causal_by_blocks(query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule, window: Window | None) -> Tensor:
    """`attention.causal` for any rule and window, a block of queries at a time."""
    prompts, heads, length, width = query.shape
    key_heads = key.shape[1]
    grouped = query.reshape(prompts * key_heads, heads // key_heads, length, width)
    keys, values = _flat(key).transpose(1, 2), _flat(value)
    before = key.shape[2] - length  # keys before the first query
    out = []
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        first = 0 if window is None else max(0, window.first(before + start))
        hidden = _hidden(before + start, before + stop, first, window, query)
        bias = hidden.repeat(heads // key_heads, 1)[None].expand(len(grouped), -1, -1)
        if rule.chosen is not None:
            seen = is_chosen(rule.chosen[:, start:stop], key.shape[2])[..., first : before + stop]  # [A, Q, K]
            bias = bias.masked_fill(~seen.repeat_interleave(key_heads, 0).repeat(1, heads // key_heads, 1), HIDDEN)
        block = grouped[:, :, start:stop].reshape(len(grouped), -1, width)
        scores = _scores(block, keys[..., first : before + stop], bias, rule)
        drained = None if rule.sinks is None else rule.sinks.view(key_heads, -1, 1).repeat_interleave(stop - start, 1)
        weights = _weights(scores, None if drained is None else drained.repeat(prompts, 1, 1))
        part = torch.bmm(weights.to(value.dtype), values[:, first : before + stop])
        out.append(part.view(prompts, heads, stop - start, width))
    return torch.cat(out, 2).transpose(1, 2)


def _hidden(start: int, stop: int, first: int, window: Window | None, like: Tensor) -> Tensor:
    """[stop - start, stop - first] `HIDDEN` where the query may not see the key, else 0."""
    query = torch.arange(start, stop, device=like.device)[:, None]
    key = torch.arange(first, stop, device=like.device)
    unseen = key > query if window is None else (key > query) | (key < window.first(query))
    return torch.zeros(unseen.shape, device=like.device, dtype=like.dtype).masked_fill_(unseen, HIDDEN)


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """[..., K] float32 softmax of `scores` [..., K]; `sinks` [..., 1] join it and are left out of the result."""
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32)
    return torch.cat((scores, sinks.to(scores.dtype)), -1).softmax(-1, dtype=torch.float32)[..., :-1]


def _scores(query: Tensor, keys: Tensor, bias: Tensor, rule: ScoreRule) -> Tensor:
    """Scores [B, Q, K] from `query` [B, Q, D], `keys` [B, D, K] and `bias` [B, Q or 1, K]."""
    if rule.softcap is None:
        return torch.baddbmm(bias, query, keys, alpha=rule.scale)
    return (torch.bmm(query, keys) * (rule.scale / rule.softcap)).tanh() * rule.softcap + bias


def _flat(x: Tensor) -> Tensor:
    """[B * H, Q, D] from [B, H, Q, D]."""
    return x.reshape(-1, x.shape[2], x.shape[3])


@dataclass(eq=False)
class RowMap:
    """Index tables between the R rows of a decode step and the P prompts they belong to.

    They change only when rows or prompts come or go, so they serve many steps and all layers.
    """

    members: Tensor
    """[P, Gmax] int64, rows of each prompt, padded with row 0."""
    back: Tensor
    """[R] int64, index of row r in the flattened `members`; 0 for a row without prompt."""
    is_regular: bool
    """True if the rows are in the order of `members` without padding, so that no gather is needed."""

    @staticmethod
    def of(owners: list[int], num_prompts: int, device: torch.device, num_rows: int | None = None) -> RowMap:
        """Tables from the prompt of each row. Further rows, up to `num_rows`, belong to none; their results are arbitrary."""
        members: list[list[int]] = [[] for _ in range(num_prompts)]
        for row, owner in enumerate(owners):
            members[owner].append(row)
        size = max(map(len, members), default=0)
        back = [0] * max(len(owners), num_rows or 0)
        for p, rows in enumerate(members):
            for g, row in enumerate(rows):
                back[row] = p * size + g
        is_regular = back == list(range(num_prompts * size))
        padded = [rows + [0] * (size - len(rows)) for rows in members]
        members_of = torch.tensor(padded, dtype=torch.int64, device=device)
        return RowMap(members_of, torch.tensor(back, dtype=torch.int64, device=device), is_regular)

    def gather(self, query: Tensor) -> Tensor:
        """[P, H, Gmax * repeats, D] from the rows' `query` [R, H, repeats, D]."""
        prompts, size = self.members.shape
        grouped = query if self.is_regular else query.index_select(0, self.members.view(-1))
        grouped = grouped.view(prompts, size, *query.shape[1:]).transpose(1, 2)  # [P, H, Gmax, repeats, D]
        return grouped.reshape(prompts, query.shape[1], -1, query.shape[3])

    def scatter(self, x: Tensor, repeats: int) -> Tensor:
        """[R, H, repeats, ...] from the prompts' `x` [P, H, Gmax * repeats, ...]."""
        prompts, heads = x.shape[:2]
        split = x.view(prompts, heads, -1, repeats, *x.shape[3:]).transpose(1, 2)  # [P, Gmax, H, repeats, ...]
        flat = split.reshape(-1, heads, repeats, *x.shape[3:])
        return flat if self.is_regular else flat.index_select(0, self.back)


@dataclass(frozen=True, eq=False)
class AttentionPart:
    """Keys and values of one part, with their biases."""

    keys: Tensor
    """[B, H, K, D]"""
    values: Tensor
    """[B, H, K, D]"""
    bias: Tensor
    """[B * H, Q or 1, K], 0 for a visible key, `HIDDEN` for a masked one."""


def wide(bias: Tensor, heads: int) -> Tensor:
    """[B * H, Q, K] from [B, Q, K]."""
    return bias[:, None].expand(-1, heads, -1, -1).reshape(-1, *bias.shape[1:])


def by_one_softmax(
    query: Tensor, suffix: AttentionPart, shared: AttentionPart, row_map: RowMap, rule: ScoreRule
) -> Tensor:
    """Scores of both parts side by side, one softmax in float32, two products with the values."""
    rows, heads, repeats = query.shape[:3]
    suffix_scores = _scores(_flat(query), _flat(suffix.keys).transpose(1, 2), suffix.bias, rule)
    grouped = row_map.gather(query)  # [P, H, Gmax * repeats, D]
    shared_scores = _scores(_flat(grouped), _flat(shared.keys).transpose(1, 2), shared.bias, rule)
    shared_scores = row_map.scatter(shared_scores.view(*grouped.shape[:3], -1), repeats)  # [R, H, repeats, K]
    scores = torch.cat((shared_scores, suffix_scores.view(rows, heads, repeats, -1)), -1)
    sinks = None if rule.sinks is None else rule.sinks.view(heads, repeats, 1).expand(rows, -1, -1, -1)
    weights = _weights(scores, sinks)
    split = shared_scores.shape[-1]
    to_shared = row_map.gather(weights[..., :split].to(query.dtype))  # [P, H, Gmax * repeats, K]
    to_suffix = weights[..., split:].to(query.dtype)
    from_shared = torch.bmm(_flat(to_shared), _flat(shared.values)).view(grouped.shape)
    from_suffix = torch.bmm(_flat(to_suffix), _flat(suffix.values)).view(query.shape)
    return from_suffix + row_map.scatter(from_shared, repeats)


@dataclass(frozen=True, eq=False)
class KeyBias:
    """Biases of P prompts' keys and of R rows' own keys."""

    prefix: Tensor
    """[P, columns]; with `is_by_row` [R, columns], as each row sees the keys of its prompt."""
    suffix: Tensor
    """[R, columns]"""
    of_prompts: dict[Hashable, Tensor] = field(default_factory=dict)
    """Biases of the prompts' keys by query and by head, filled on first use."""
    of_rows: dict[Hashable, Tensor] = field(default_factory=dict)
    """Biases of the rows' own keys by head, filled on first use."""
    is_by_row: bool = False

    def in_window(self, window: Window, owners: Tensor, position: Tensor, now: Tensor | int) -> KeyBias:
        """A copy by row, with the keys before the window of each row's `position` hidden too, which is its own column `now`.

        `owners` and `position` [R or more] are the prompts and positions of the rows.
        """
        rows = len(self.suffix)
        owners, position = owners[:rows], position[:rows]
        first = window.first(position)
        prefix = _hidden_before(self.prefix[owners], first)
        return KeyBias(prefix, _hidden_before(self.suffix, first - position + now), is_by_row=True)

    def of_chosen(self, places: Tensor, owners: Tensor) -> KeyBias:
        """A copy by row, with all keys hidden but those at `places` [R, k] among the prompt's and the row's own. `owners` as above."""
        rows = len(self.suffix)
        prefix = self.prefix if self.is_by_row else self.prefix[owners[:rows]]
        both = torch.cat((prefix, self.suffix), 1)
        both = both.masked_fill(~is_chosen(places, both.shape[1]), HIDDEN)
        prefix, suffix = both.split((prefix.shape[1], self.suffix.shape[1]), 1)
        return KeyBias(prefix, suffix, is_by_row=True)

    def shared(self, row_map: RowMap, repeats: int, heads: int) -> Tensor:
        """Biases [P * H, Q or 1, columns] of the prompts' keys for the queries that `row_map` gathers."""
        return _made(self.of_prompts, (repeats, heads), lambda: wide(self._gathered(row_map, repeats), heads))

    def of_suffix(self, heads: int) -> Tensor:
        """Biases [R * H, 1, columns] of the rows' own keys."""
        return _made(self.of_rows, heads, lambda: wide(self.suffix[:, None], heads))

    def _gathered(self, row_map: RowMap, repeats: int) -> Tensor:
        if not self.is_by_row:
            return self.prefix[:, None]
        return self.prefix[row_map.members].repeat_interleave(repeats, 1)


def _made(cache: dict[Hashable, Tensor], key: Hashable, make: Callable[[], Tensor]) -> Tensor:
    if key not in cache:
        cache[key] = make()
    return cache[key]


def _hidden_before(bias: Tensor, first: Tensor) -> Tensor:
    """`bias` [B, K] with the columns before `first` [B] hidden too."""
    column = torch.arange(bias.shape[1], device=bias.device)
    return bias.masked_fill(column < first[:, None], HIDDEN)
