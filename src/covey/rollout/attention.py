"""Decode attention in two parts, merged exactly: keys of a group's prompt, shared, and each completion's own keys.

The queries of all completions of a group are rows of one product with the prompt's keys, which are stored and read once
(Hydragen, Juravsky et al. 2024). The scores of both are concatenated for one softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from covey.errors import Unsupported
from covey.kernels import CHOICE, Window, is_chosen

NAME = "covey_rollout"
"""Name of this attention in transformers' interface. It has no mask function, so transformers builds no mask."""

LAYER = "covey_layer"
"""Attribute of keys that a cache has seen: their layer, where several share one module of attention (Zamba)."""

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


class Batch(Protocol):
    """Batch of a forward pass, handed to every attention layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
        """[B, L, Hq, D] from `query` [B, Hq, L, D] and the new `key`, `value` [B, Hkv, L, D], which it also keeps."""


def register() -> None:
    """Register `attention_forward` with transformers; idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)


def attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention function of transformers' interface; the batch is the keyword `covey_batch` of the model's forward.

    Values narrower than the keys (multi-head latent attention) are stored with zeros behind them. Under autocast all are in its type.
    The result is contiguous, as that of transformers' own functions: some layers take a view of it.
    """
    batch = options.get("covey_batch")
    if batch is None:
        raise Unsupported(f"{type(module).__name__} does not hand the forward's keywords to its attention")
    layer = getattr(key, LAYER, module.layer_idx)
    missing = key.shape[-1] - value.shape[-1]
    if value.shape[:-1] != key.shape[:-1] or query.shape[-1] != key.shape[-1] or missing < 0:
        raise Unsupported(f"{type(module).__name__} has queries, keys and values of different shapes")
    if missing:
        value = torch.nn.functional.pad(value, (0, missing))
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    rule = ScoreRule(scale, options.get("softcap"), options.get("s_aux"), options.get(CHOICE))
    out = batch.attend(layer, query, key, value, rule)
    return (out[..., :-missing] if missing else out).contiguous(), None


QUERY_BLOCK = 128
"""Queries of a prompt computed together; keys after the block are skipped."""


def causal(query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule, window: Window | None = None) -> Tensor:
    """[A, L, Hq, D], each token attending to itself and those before it in its window; padding on the right is never seen.

    `key` and `value` [A, Hkv, K, D]: the queries are the last L of K tokens. On a CPU in bfloat16, blocks of matrix products take
    half the time of torch's SDPA (8 prompts of 900 tokens).
    """
    is_slow = query.device.type == "cpu" and query.dtype == torch.bfloat16
    length, keys = query.shape[2], key.shape[2]
    window = window if window is not None and window.hides(keys) else None
    rule = rule.among(keys)
    if not rule.is_plain or window is not None or is_slow:
        return _causal_by_blocks(query, key, value, rule, window)
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    mask = None  # [L, K]
    if length < keys:
        mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril_(keys - length)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=rule.scale
    )
    return out.transpose(1, 2)


def _causal_by_blocks(query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule, window: Window | None) -> Tensor:
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
