"""Attention of packed rows `[prompt | c1 | ... | cG]` on a CPU: no padding, no mask, no copy of a prompt's keys.

Every completion token attends to the prompt (all queries of a group in one matmul, without mask) and to its own
completion (causal). The compiled kernels, where they run, compute all of it in one call. Otherwise the two parts are merged by
their log-sum-exp; the flash backward of each part with the merged output and log-sum-exp is exact, so keys and values of the
prompt collect the gradients of the whole group in one product.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from covey.kernels.attention_product import Layout
from covey.kernels.packed_attention import empty_like, packed_attention_for


class SharedAttention(torch.autograd.Function):
    """`(query [H, S, D], key [K, S, D], value [K, S, D], layouts, scale)` -> [H, S, D]; K divides H (grouped queries)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layouts: Sequence[Layout], scale: float) -> Tensor:
        ctx.layouts, ctx.scale = layouts, scale
        ctx.kernels = packed_attention_for(query, key, layouts)
        if ctx.kernels is not None:
            out: Tensor
            out, normalizer = ctx.kernels.forward(query, key, value, layouts, scale)
            ctx.save_for_backward(query, key, value, out, normalizer)
            return out
        heads, tokens, _ = query.shape
        out = empty_like(query)
        wide = torch.promote_types(query.dtype, torch.float32)
        normalizer = query.new_empty(heads, tokens, dtype=wide)
        for layout in layouts:
            for place in (layout.prompt, *layout.each_answer()):
                part, log_sum = _causal(query[:, place], key[:, place], value[:, place], scale)
                out[:, place], normalizer[:, place] = part, log_sum
            place = layout.answers
            if place.start == place.stop:
                continue
            part, log_sum = _whole(query[:, place], key[:, layout.prompt], value[:, layout.prompt], scale)
            causal_lse = normalizer[:, place]
            weight = torch.sigmoid(log_sum - causal_lse)[..., None].to(part.dtype)
            out[:, place] = torch.lerp(out[:, place], part, weight)
            normalizer[:, place] = torch.logaddexp(log_sum, causal_lse)
        ctx.save_for_backward(query, key, value, out, normalizer)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.kernels is not None:
            return *ctx.kernels.backward(gradient, ctx.saved_tensors, ctx.layouts, ctx.scale), None, None
        query, key, value, out, normalizer = ctx.saved_tensors
        dq, dk, dv = empty_like(query), empty_like(key), empty_like(value)
        for layout in ctx.layouts:
            for place in (layout.prompt, *layout.each_answer()):
                tensors = [x[:, place] for x in (gradient, query, key, value, out, normalizer)]
                parts = _causal_backward(tensors, ctx.scale)
                dq[:, place], dk[:, place], dv[:, place] = parts
            place, seen = layout.answers, layout.prompt
            if place.start == place.stop:
                continue
            parts = _whole_backward(
                gradient[:, place], query[:, place], key[:, seen], value[:, seen], out[:, place], normalizer[:, place], ctx.scale
            )  # fmt: skip
            dq[:, place] += parts[0]
            dk[:, seen] += parts[1]
            dv[:, seen] += parts[2]
        return dq, dk, dv, None, None


SHORT = 512
"""Sequence length below which bfloat16 is slower than float32: with 85 tokens its backward takes 2.8 times as long."""

FEW = 96
"""Number of prompt keys below which bfloat16 is slower for completion tokens: with 45 keys six times."""

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _widened(x: Tensor) -> Tensor:
    """`x` [., T, D], in float32 if that is faster."""
    return x.float() if x.dtype == torch.bfloat16 and x.shape[1] < SHORT else x


def _repeated(x: Tensor, repeats: int) -> Tensor:
    """[K, T, D] -> [1, K * repeats, T, D], each head as often as queries share it."""
    return (x if repeats == 1 else x.repeat_interleave(repeats, 0))[None]


def _summed(x: Tensor, repeats: int) -> Tensor:
    """The gradient of `_repeated`."""
    return x[0] if repeats == 1 else x[0].unflatten(0, (-1, repeats)).sum(1)


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output [H, T, D] and log-sum-exp [H, T] of causal attention."""
    repeats = query.shape[0] // key.shape[0]
    query, key, value = _widened(query), _widened(key), _widened(value)
    out, log_sum = _forward(query[None], _repeated(key, repeats), _repeated(value, repeats), 0.0, True, scale=scale)
    return out[0], log_sum[0]


def _causal_backward(tensors: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. `tensors`: output gradient, query, key, value, output, log-sum-exp."""
    gradient, query, key, value, out = map(_widened, tensors[:5])
    normalizer, repeats = tensors[5], query.shape[0] // key.shape[0]
    dq, dk, dv = _backward(
        gradient[None], query[None], _repeated(key, repeats), _repeated(value, repeats), out[None],
        _contiguous(normalizer), 0.0, True, scale=scale,
    )  # fmt: skip
    return dq[0], _summed(dk, repeats), _summed(dv, repeats)


def _stacked(x: Tensor, groups: int) -> Tensor:
    """[H, T, ...] -> [1, K, H / K * T, ...]: heads that share keys become rows of one matmul."""
    return x.reshape(groups, -1, *x.shape[2:])[None]


def _whole(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output [H, T, D] and log-sum-exp [H, T] of attention without mask."""
    out, log_sum = _forward(_stacked(query, key.shape[0]), key[None], value[None], 0.0, False, scale=scale)
    return out[0].reshape(query.shape), log_sum[0].reshape(query.shape[:2])


def _whole_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, normalizer: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    groups = key.shape[0]
    if key.shape[1] < FEW and key.dtype == torch.bfloat16:
        gradient, query, key, value, out = (x.float() for x in (gradient, query, key, value, out))
    stacked = [_stacked(x, groups) for x in (gradient, query, out)]
    normalizer = _contiguous(_stacked(normalizer, groups)[0])
    dq, dk, dv = _backward(
        stacked[0], stacked[1], key[None], value[None], stacked[2], normalizer, 0.0, False, scale=scale
    )
    return dq[0].reshape(query.shape), dk[0], dv[0]


def _contiguous(normalizer: Tensor) -> Tensor:
    """[H, T] -> [1, H, T] in the memory layout of the forward, tokens outermost, which the backward assumes."""
    return normalizer.t().contiguous().t()[None]


def runs_here(query: Tensor, value: Tensor, dropout: float) -> bool:
    """True if `SharedAttention` can compute it: on a CPU, without dropout, with a supported dtype and shape."""
    is_supported = query.dtype in (torch.float32, torch.bfloat16, torch.float64) and query.shape[-1] == value.shape[-1]
    return query.device.type == "cpu" and dropout == 0.0 and is_supported
