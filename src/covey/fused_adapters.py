"""Linear layers with a LoRA adapter, as PEFT has them: one function that adds the adapter's share in place, forward and backward.

`x W' + s (x A') B'` (Hu et al. 2021, <https://arxiv.org/abs/2106.09685>, section 4.1) by PEFT's own modules makes three tensors of the
size of the output and keeps one; on a CPU the others leave holes in the heap that were two thirds of what a step held.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from covey import products
from covey.fused_operations import Forward, is_plain, is_watched, products_type


class _Adapter(NamedTuple):
    base: nn.Linear
    down: nn.Linear
    """A [r, K]"""
    up: nn.Linear
    """B [N, r]"""
    scale: float


def is_adapted(module: nn.Module) -> bool:
    """Whether it is PEFT's linear layer with adapters, which `adapted` may compute."""
    kind = type(module)
    return kind.__name__ == "Linear" and kind.__module__ == "peft.tuners.lora.layer"


def adapted(module: Any, original: Forward, x: Tensor, *more: Any, **named: Any) -> Any:
    """The layer's output, by `original` wherever it is anything but one plain adapter over a frozen matrix."""
    found = None if more or named else _adapter_of(module)
    if found is None:
        return original(x, *more, **named)
    base, down, up, scale = found
    weights = base.weight, down.weight, up.weight
    dtype = products_type(x)
    is_cast = torch.is_autocast_enabled("cpu")
    if not is_plain(x, *weights) or not (is_cast or all(weight.dtype == dtype for weight in weights)):
        return original(x)
    return _Adapted.apply(x.to(dtype), *weights, base.bias, scale)


def _adapter_of(module: Any) -> _Adapter | None:
    """The one that is in use; None where there is none, or anything beside it."""
    names = [name for name in module.active_adapters if name in module.lora_A]
    if module.disable_adapters or module.merged or len(names) != 1 or module.lora_variant:
        return None
    (name,) = names
    base, down, up, dropout = module.base_layer, module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    is_plain_adapter = (
        all(type(part) is nn.Linear for part in (base, down, up))
        and not any(is_watched(part) for part in (base, down, up, dropout))
        and down.bias is None
        and up.bias is None
        and not any(parameter.requires_grad for parameter in base.parameters())
        and (isinstance(dropout, nn.Identity) or not dropout.training)
    )
    return _Adapter(base, down, up, float(module.scaling[name])) if is_plain_adapter else None


class _Adapted(torch.autograd.Function):
    """`(x [.., K], W [N, K], A [r, K], B [N, r], bias [N] or None, s)` -> `x W' + bias + s (x A') B'` [.., N] in the type of `x`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, down: Tensor, up: Tensor, bias: Tensor | None, scale: float
    ) -> Any:
        flat = x.reshape(-1, x.shape[-1])
        inner = products.forward(flat, down, None).mul_(scale)
        ctx.save_for_backward(x, weight, down, up, inner)
        ctx.scale = scale
        out = products.forward(flat, weight, bias)
        return products.shaped(_add_product(out, inner, up), *x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, down, up, inner = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_inner = products.of_input(flat, up).mul_(ctx.scale)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = _add_product(products.of_input(flat, weight), of_inner, down.t()).view_as(x)
        of_down = of_up = None
        if ctx.needs_input_grad[2]:
            of_down = products.of_weight(of_inner, x.reshape(-1, x.shape[-1]), down)
        if ctx.needs_input_grad[3]:
            of_up = products.of_weight(flat, inner, up)
        return of_x, None, of_down, of_up, None, None


def _add_product(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """`out` [M, N], with `x` [M, r] times `weight` [N, r] added in place."""
    if out.dtype == weight.dtype == torch.float32:
        return out.addmm_(x, weight.t())
    return out.add_(products.forward(x, weight, None))
