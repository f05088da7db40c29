"""Attention of a prefill, and the engine's attention inside of a model's own modules."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from covey.errors import Unsupported
from covey.kernels import CHOICE, Window
from covey.rollout.softmax_attention import ScoreRule, causal_by_blocks

NAME = "covey_rollout"
"""Name of this attention in transformers' interface. It has no mask function, so transformers builds no mask."""

LAYER = "covey_layer"
"""Attribute of keys that a cache has seen: their layer, where several share one module of attention (Zamba)."""


class Batch(Protocol):
    """Batch of a forward pass, handed to every attention layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
        """[B, L, Hq, D] from `query` [B, Hq, L, D] and the new `key`, `value` [B, Hkv, L, D], which it also keeps."""


def register() -> None:
    """Register `attention_forward` with transformers; idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
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
        return causal_by_blocks(query, key, value, rule, window)
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
