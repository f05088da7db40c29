"""What the layers of `covey.fused_layers` compute by kernels, with gradients: residual sums, norms, gated layers, rotations.

Each function takes the module, or function, and what it computes itself, which is called where the kernels do not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from covey import products
from covey.compiled.layers import LANES, Kernels, kernels_for

Forward = Callable[..., Any]


def products_type(x: Tensor) -> torch.dtype:
    """What the products that read `x` are computed in."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype


def is_plain(*tensors: Any) -> bool:
    """Whether the kernels may read them: in a CPU's memory, no subclass that spreads a tensor over processes."""
    return all(type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" for x in tensors)


def is_watched(module: nn.Module) -> bool:
    """Whether somebody has hooked into it, or put a `forward` of their own there."""
    return "forward" in module.__dict__ or _is_hooked(module)


def _is_hooked(module: nn.Module) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks)


def epsilon_of(norm: Any) -> float | None:
    found = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
    return found if isinstance(found, float) else None


def layer(block: Any, original: Forward, x: Tensor, *more: Any, **named: Any) -> Any:
    """A layer of two residual sums, where it keeps its activations: the first with the norm that reads it, in one pass."""
    norm = block.post_attention_layernorm
    if more or not _is_normed(norm) or getattr(block, "gradient_checkpointing", False):
        return original(x, *more, **named)
    update = block.self_attn(hidden_states=block.input_layernorm(x), **named)[0]
    kernels = _kernels_of_sum(x, update)
    if kernels is None or not is_plain(norm.weight) or products_type(norm.weight) != update.dtype:
        x = x + update
        return x + block.mlp(norm(x))
    x, inner = _SumNorm.apply(x, update.contiguous(), norm.weight, epsilon_of(norm), kernels)
    update = block.mlp(inner)
    kernels = _kernels_of_sum(x, update)
    return x + update if kernels is None else _Sum.apply(x, update.contiguous(), kernels)


def _is_normed(norm: nn.Module) -> bool:
    """Whether `normed` computes it, and nobody else looks at it."""
    found = norm.__dict__.get("forward")
    return isinstance(found, partial) and found.func is normed and found.args[0] is norm and not _is_hooked(norm)


def _kernels_of_sum(x: Tensor, update: Tensor) -> Kernels | None:
    fits = is_plain(x, update) and x.is_contiguous() and x.shape == update.shape and not x.shape[-1] % LANES
    return kernels_for(x.dtype, update.dtype) if fits and update.dtype == products_type(x) else None


def normed(norm: Any, original: Forward, x: Tensor) -> Any:
    dtype = products_type(x)
    fits = is_plain(x, norm.weight) and x.is_contiguous() and products_type(norm.weight) == dtype
    kernels = kernels_for(x.dtype, dtype) if fits else None
    return original(x) if kernels is None else _Norm.apply(x, norm.weight, epsilon_of(norm), dtype, kernels)


def gated(mlp: Any, original: Forward, x: Tensor) -> Any:
    if is_watched(mlp.act_fn):
        return original(x)
    gate, up, down = mlp.gate_proj(x), mlp.up_proj(x), mlp.down_proj
    fits = is_plain(gate, up) and up.dtype == gate.dtype and not gate.shape[-1] % LANES
    kernels = kernels_for(gate.dtype, gate.dtype) if fits else None
    if kernels is None:
        return down(mlp.act_fn(gate) * up)
    gate, up = gate.contiguous(), up.contiguous()
    if type(down) is nn.Linear and is_plain(down.weight) and not is_watched(down):
        return _GatedDown.apply(gate, up, down.weight, down.bias, kernels)
    return down(_Gate.apply(gate, up, kernels))


def rotated(
    original: Forward, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor, *more: Any, **kinds: Any
) -> Any:
    size = query.shape[-1]
    angles = (torch.Size([batch, query.shape[2], size]) for batch in (1, len(query)))
    fits = not more and not kinds and is_plain(query, key, cosines, sines) and query.dtype == key.dtype
    fits = fits and size % (2 * LANES) == 0 and cosines.shape in angles and sines.shape == cosines.shape
    kernels = kernels_for(query.dtype, query.dtype) if fits else None
    if kernels is None:
        return original(query, key, cosines, sines, *more, **kinds)
    spread = lambda x: x.expand(len(query), -1, -1).reshape(-1, size).float().contiguous()
    return _Rotation.apply(query, key, spread(cosines), spread(sines), kernels)


def _heads_in_rows(x: Tensor) -> Tensor:
    """[B, H, S, D] with B and S one dimension in memory, and D contiguous."""
    fits = x.stride(3) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[2] * x.stride(2))
    return x if fits else x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


class _Norm(torch.autograd.Function):
    """`(x [.., D], weight [D], epsilon, dtype, kernels)` -> [.., D] in `dtype`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype, kernels: Kernels) -> Tensor:
        out, scales = kernels.norm(x, weight.float(), epsilon, dtype)
        ctx.save_for_backward(x, weight, scales)
        ctx.kernels = kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, scales = ctx.saved_tensors
        of_x, of_weight = ctx.kernels.norm_backward(gradient.contiguous(), x, weight.float(), scales)
        return of_x, of_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None, None, None, None


class _SumNorm(torch.autograd.Function):
    """`(x [.., D], update [.., D], weight [D], epsilon, kernels)` -> `x + update`, and its norm in the type of `update`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, update: Tensor, weight: Tensor, epsilon: float, kernels: Kernels) -> Any:
        total, out, scales = kernels.add_norm(x, update, weight.float(), epsilon)
        ctx.save_for_backward(total, weight, scales)
        ctx.kernels = kernels
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor, gradient: Tensor) -> Any:
        total, weight, scales = ctx.saved_tensors
        of_x, of_update, of_weight = ctx.kernels.add_norm_backward(
            gradient.contiguous(), of_total.contiguous(), total, weight.float(), scales
        )
        return of_x, of_update, of_weight.to(weight.dtype) if ctx.needs_input_grad[2] else None, None, None


class _Sum(torch.autograd.Function):
    """`(x [.., D], update [.., D], kernels)` -> `x + update` in the type of `x`; torch makes a copy of one to add two types."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, update: Tensor, kernels: Kernels) -> Tensor:
        ctx.dtype = update.dtype
        return kernels.add(x, update)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient.to(ctx.dtype), None


class _Gate(torch.autograd.Function):
    """`(gate [.., F], up [.., F], kernels)` -> `silu(gate) * up`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return kernels.gate(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return *ctx.kernels.gate_backward(gradient.contiguous(), *ctx.saved_tensors), None


class _GatedDown(torch.autograd.Function):
    """`(gate [.., F], up [.., F], weight [D, F], bias [D] or None, kernels)` -> [.., D].

    What goes into the product is computed again in the backward pass, where both of its factors are at hand anyway.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        known = weight if products.in_pairs(gate, weight) else weight.to(gate.dtype)
        ctx.save_for_backward(gate, up, known)
        ctx.kernels, ctx.dtype, ctx.bias = kernels, weight.dtype, None if bias is None else bias.dtype
        return products.forward(kernels.gate(gate, up), known, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        inner = products.of_input(flat, weight)
        of_gate, of_up = ctx.kernels.gate_backward(inner, gate, up, repeats=True)
        wants_weight, wants_bias = ctx.needs_input_grad[2:4]
        of_weight = products.of_weight(flat, inner, weight).to(ctx.dtype) if wants_weight else None
        return of_gate, of_up, of_weight, flat.sum(0, dtype=ctx.bias) if wants_bias and ctx.bias else None, None


class _Rotation(torch.autograd.Function):
    """`(query [B, H, S, D], key [B, K, S, D], cosines [B * S, D], sines [B * S, D], kernels)` -> both, rotated."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor, kernels: Kernels) -> Any:
        ctx.save_for_backward(cosines, sines)
        ctx.kernels = kernels
        return tuple(kernels.rotate(_heads_in_rows(x), cosines, sines) for x in (query, key))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        cosines, sines = ctx.saved_tensors
        turn = lambda x: ctx.kernels.rotate(_heads_in_rows(x), cosines, sines, back=True)
        return *map(turn, gradients), None, None, None
