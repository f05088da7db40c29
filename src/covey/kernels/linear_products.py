"""Products of linear layers with one input, and of their LoRA adapters, as one autograd function.

Gradients of the input are added up inside of the products. So is an adapter (Hu et al. 2021, https://arxiv.org/abs/2106.09685): its product
adds to that of the frozen weight, and the sum is rounded once. PEFT takes passes over the whole output for the scale and for the sum,
there and back, and rounds after each.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class Factors(NamedTuple):
    """Weight [N, K] and bias [N] of a linear layer, A [r, K] and B [N, r] of its adapter, and each of them in the type of the input.

    `dropped` [.., K] is the adapter's input after dropout; None without dropout.
    """

    weight: Tensor
    bias: Tensor | None
    narrow: Tensor
    narrow_bias: Tensor | None
    a: Tensor | None = None
    b: Tensor | None = None
    narrow_a: Tensor | None = None
    narrow_b: Tensor | None = None
    dropped: Tensor | None = None
    scale: float = 1.0


_TENSORS = len(Factors._fields) - 1


def multiply(x: Tensor, *layers: Factors) -> tuple[Tensor, ...]:
    """Output [.., N] of each layer for `x` [.., K], in its type. Gradients have the types of weights, biases and adapters."""
    tensors = (tensor for layer in layers for tensor in layer[:-1])
    outputs: tuple[Tensor, ...] = _Products.apply(x, [layer.scale for layer in layers], *tensors)
    return outputs


def add_adapter(out: Tensor, inner: Tensor, b: Tensor, scale: float) -> None:
    """Add `scale * inner @ b.T`, an adapter's product, to `out` [M, N] in place; `inner` [M, r] is its input times A."""
    out.addmm_(inner, b.t(), alpha=scale)


class _Products(torch.autograd.Function):
    """`(x, scales, tensors of the layers' Factors)` -> the output of each layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: list[float], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.scales, ctx.types = scales, [None if tensor is None else tensor.dtype for tensor in tensors]
        outputs, saved = [], []
        with torch.autocast(x.device.type, enabled=False):
            for i in range(len(scales)):
                layer, needs = _of_layer(tensors, i), _of_layer(ctx.needs_input_grad[2:], i)
                out, inner = F.linear(x, layer.narrow, layer.narrow_bias), None
                source = x if layer.dropped is None else layer.dropped
                if layer.narrow_a is not None and layer.narrow_b is not None:
                    inner = _flat(source) @ layer.narrow_a.t()
                    add_adapter(_flat(out), inner, layer.narrow_b, scales[i])
                outputs.append(out)
                saved += [layer.narrow, layer.narrow_a, layer.narrow_b, x if needs.weight else None]
                saved += [source if needs.a else None, inner if needs.b else None]
        ctx.save_for_backward(*saved)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        of_x: Tensor | None = None
        results: list[Tensor | None] = []
        saved = ctx.saved_tensors  # read once: recomputation makes them then
        with torch.autocast(gradients[0].device.type, enabled=False):
            for i, (gradient, scale) in enumerate(zip(gradients, ctx.scales, strict=True)):
                narrow, a, b, x, source, inner = saved[6 * i : 6 * i + 6]
                needs, types = _of_layer(ctx.needs_input_grad[2:], i), _of_layer(ctx.types, i)
                flat, of_dropped = _flat(gradient), None
                if ctx.needs_input_grad[0]:
                    of_x = flat @ narrow if of_x is None else of_x.addmm_(flat, narrow)
                of_inner = None if a is None else torch.addmm(flat.new_empty(1, 1), flat, b, beta=0, alpha=scale)
                if of_inner is not None and needs.dropped:
                    of_dropped = (of_inner @ a).view(*gradient.shape[:-1], a.shape[1])
                elif of_inner is not None and of_x is not None and types.dropped is None:
                    of_x.addmm_(of_inner, a)
                of_weight = _product(flat, x, types.weight) if needs.weight else None
                of_bias = flat.sum(0, dtype=types.bias) if needs.bias else None
                of_a = _product(of_inner, source, types.a) if needs.a and of_inner is not None else None
                of_b = _product(flat, inner, types.b).mul_(scale) if needs.b else None
                results += [of_weight, of_bias, None, None, of_a, of_b, None, None, of_dropped]
        shape = (*gradients[0].shape[:-1], narrow.shape[1])
        return None if of_x is None else of_x.view(shape), None, *results


def _of_layer(values: Any, i: int) -> Any:
    """`Factors` of layer `i`, of what is listed for the tensors of all layers."""
    return Factors(*values[_TENSORS * i : _TENSORS * (i + 1)])


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _product(gradient: Tensor, source: Tensor, dtype: torch.dtype) -> Tensor:
    """`gradient.T @ source` [N, K] in `dtype`, from [M, N] and [M, K]; float32 from 16 bits is not rounded in between on a GPU."""
    left, right = gradient.t(), _flat(source)
    if dtype == torch.float32 and left.device.type == "cuda" and torch.version.hip is None:
        product: Tensor = torch.mm(left, right, out_dtype=torch.float32)
        return product
    return (left @ right).to(dtype)
