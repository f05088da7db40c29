"""Autograd functions of `fused_model`: RMSNorm and gated MLP by the kernels of `fused_ops`.

Each entry point takes the module, and its original forward as a fallback for inputs that the kernels do not support.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from covey.kernels import matmul
from covey.kernels.fused_ops import LANES, LayerKernels, layer_kernels
from covey.kernels.norms import epsilon_of

Forward = Callable[..., Any]


def products_type(x: Tensor) -> torch.dtype:
    """The dtype of matmuls that read `x`: autocast's, or its own."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype


def is_plain(*tensors: Any) -> bool:
    """True for plain CPU tensors, which kernels may read: no subclass such as DTensor."""
    return all(type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" for x in tensors)


def is_watched(module: nn.Module) -> bool:
    """True if the module has hooks, or a foreign `forward` on the instance."""
    return ("forward" in module.__dict__ and not matmul.is_routed(module)) or matmul.is_hooked(module)


def normed(norm: Any, original: Forward, x: Tensor) -> Any:
    dtype = products_type(x)
    fits = is_plain(x, norm.weight) and x.is_contiguous() and products_type(norm.weight) == dtype
    kernels = layer_kernels(x.dtype, dtype) if fits else None
    return original(x) if kernels is None else _Norm.apply(x, norm.weight, epsilon_of(norm), dtype, kernels)


def gated(mlp: Any, original: Forward, x: Tensor) -> Any:
    if is_watched(mlp.act_fn):
        return original(x)
    gate, up, down = mlp.gate_proj(x), mlp.up_proj(x), mlp.down_proj
    fits = is_plain(gate, up) and up.dtype == gate.dtype and not gate.shape[-1] % LANES
    kernels = layer_kernels(gate.dtype, gate.dtype) if fits else None
    if kernels is None:
        return down(mlp.act_fn(gate) * up)
    gate, up = gate.contiguous(), up.contiguous()
    if type(down) is nn.Linear and is_plain(down.weight) and not is_watched(down):
        return _GatedDown.apply(gate, up, down.weight, down.bias, kernels)
    return down(_Gate.apply(gate, up, kernels))


class _Norm(torch.autograd.Function):
    """`(x [.., D], weight [D], epsilon, dtype, kernels)` -> [.., D] in `dtype`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype, kernels: LayerKernels
    ) -> Tensor:
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


class _Gate(torch.autograd.Function):
    """`(gate [.., F], up [.., F], kernels)` -> `silu(gate) * up`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: LayerKernels) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return kernels.gate(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return *ctx.kernels.gate_backward(gradient.contiguous(), *ctx.saved_tensors), None


class _GatedDown(torch.autograd.Function):
    """`(gate [.., F], up [.., F], weight [D, F], bias [D] or None, kernels)` -> [.., D].

    The input of `down`, `silu(gate) * up`, is recomputed in the backward pass, which needs both factors anyway.
    """

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, kernels: LayerKernels
    ) -> Tensor:
        narrow = weight.to(gate.dtype)
        ctx.save_for_backward(gate, up, narrow)
        ctx.kernels, ctx.dtype, ctx.bias = kernels, weight.dtype, None if bias is None else bias.dtype
        return matmul.linear_forward(kernels.gate(gate, up), narrow, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        inner = matmul.input_gradient(flat, weight)
        of_gate, of_up = ctx.kernels.gate_backward(inner, gate, up, repeats=True)
        wants_weight, wants_bias = ctx.needs_input_grad[2:4]
        of_weight = matmul.weight_gradient(flat, inner, weight).to(ctx.dtype) if wants_weight else None
        return of_gate, of_up, of_weight, flat.sum(0, dtype=ctx.bias) if wants_bias and ctx.bias else None, None
