"""One 16-bit copy of a model's linear layers, made once a step and read by every pass of the learner, and by the sampler.

Autocast casts a float32 weight in each forward pass, again where activations are recomputed, and its gradient back: 15,564 casts in one
step of a 0.5B model on an H100. FSDP2's `MixedPrecisionPolicy` and torchtitan keep one cast a step in the same way: products read
16 bits, the master weights, their gradients and the optimizer are float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_Copy = tuple[Tensor, Tensor | None]
"""Weight [N, K] and bias [N] of a layer in 16 bits."""

_samplers: WeakKeyDictionary[nn.Module, _Copy] = WeakKeyDictionary()
"""The sampler's copy of each linear layer, in memory that the learner may read and write."""


def share_copy(linear: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    """Offer the sampler's copy of a linear layer, a part of a merged one, to `HalfWeights` of the model that holds the layer."""
    _samplers[linear] = weight, bias


class HalfWeights:
    """The copy of the linear layers of `model` that have float32 weights, in `dtype`; layers of `leaves_out` are left out.

    Inside `fresh` each layer computes with its copy, and gradients reach the float32 parameters in float32. Outside, layers compute as
    they do without it.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, leaves_out: tuple[Any, ...] = ()) -> None:
        self.dtype = dtype
        self.is_fresh = False
        self.linears = [
            module
            for module in model.modules()
            if type(module) is nn.Linear
            and "forward" not in module.__dict__
            and not any(module is other for other in leaves_out)
            and type(module.weight) is nn.Parameter
            and module.weight.dtype == torch.float32
        ]
        self.copies: dict[nn.Linear, _Copy] = {}
        self.sources: dict[nn.Linear, tuple[int, ...]] = {}
        """Addresses of what was copied: inside of `fresh` other weights may be put in place for a pass, such as a reference's adapter."""
        for linear in self.linears:
            linear.__dict__["forward"] = partial(_forward, linear, self)

    def __reduce__(self) -> Any:
        """A copy of the model, or the model in another process, computes as without this."""
        return HalfWeights, (nn.Module(), self.dtype)

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """Context of a step: the weights are copied now and must not change inside. Reentrant."""
        if self.is_fresh:
            yield
            return
        self.refresh()
        self.is_fresh = True
        try:
            yield
        finally:
            self.is_fresh = False

    def copy_for(self, linear: nn.Module, x: Tensor) -> _Copy | None:
        """The layer's copy, where a product of `x` may read it: inside of `fresh`, under autocast to its type, of the weights in place."""
        device = x.device.type
        computes = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == self.dtype
        if not (self.is_fresh and computes) or self.sources.get(linear) != _addresses(linear):  # type: ignore[call-overload]
            return None
        return self.copies[linear]  # type: ignore[index]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights as they are now, in a few kernels, into memory that stays."""
        targets, sources = [], []
        for linear in self.linears:
            copy = self.copies[linear] = self._copy_of(linear)
            self.sources[linear] = _addresses(linear)
            for target, source in zip(copy, (linear.weight, linear.bias), strict=True):
                if target is not None and source is not None:
                    targets.append(target)
                    sources.append(source.detach())
        if targets:
            torch._foreach_copy_(targets, sources)

    def _fits(self, copy: Tensor | None, weight: Tensor | None) -> bool:
        if copy is None or weight is None:
            return copy is weight
        return (copy.shape, copy.dtype, copy.device) == (weight.shape, self.dtype, weight.device)

    def _copy_of(self, linear: nn.Linear) -> _Copy:
        """The sampler's memory where it fits, the memory of before, or new memory."""
        for candidate in (_samplers.get(linear), self.copies.get(linear)):
            if candidate is not None and all(map(self._fits, candidate, (linear.weight, linear.bias))):
                return candidate
        bias = None if linear.bias is None else torch.empty_like(linear.bias, dtype=self.dtype)
        return torch.empty_like(linear.weight, dtype=self.dtype), bias


def _addresses(linear: Any) -> tuple[int, ...]:
    return tuple(held.data_ptr() for held in (linear.weight, linear.bias) if held is not None)


def _forward(linear: nn.Linear, half: HalfWeights, x: Tensor) -> Tensor:
    copy = half.copy_for(linear, x)
    if copy is None:
        return F.linear(x, linear.weight, linear.bias)
    out: Tensor
    (out,) = _Linears.apply(x.to(half.dtype), linear.weight, linear.bias, *copy)
    return out


def products_of(x: Tensor, *linears: nn.Module) -> list[Tensor]:
    """Outputs of several linear layers of one input; those of `HalfWeights` add the gradient of `x` within their products."""
    halves = [_half_of(linear) for linear in linears]
    copies = [None if half is None else half.copy_for(linear, x) for half, linear in zip(halves, linears, strict=True)]
    if halves[0] is None or any(copy is None for copy in copies):
        return [linear(x) for linear in linears]
    tensors = [
        (linear.weight, linear.bias, *copy) for linear, copy in zip(linears, copies, strict=True) if copy is not None
    ]
    return list(_Linears.apply(x.to(halves[0].dtype), *(part for parts in tensors for part in parts)))


def _half_of(linear: nn.Module) -> HalfWeights | None:
    forward = linear.__dict__.get("forward")
    if not isinstance(forward, partial) or forward.func is not _forward:
        return None
    half: HalfWeights = forward.args[1]
    return None if linear._forward_hooks or linear._forward_pre_hooks else half


class _Linears(torch.autograd.Function):
    """`(x [.., K], then for each layer weight [N, K], bias [N] or None, and their 16-bit copies)` -> the [.., N] of each layer.

    Gradients of weights and biases are float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *layers: Tensor | None) -> tuple[Tensor, ...]:
        narrow = layers[2::4]
        ctx.save_for_backward(x if any(ctx.needs_input_grad[1:]) else None, *narrow)
        with torch.autocast(x.device.type, enabled=False):
            return tuple(F.linear(x, w, b) for w, b in zip(narrow, layers[3::4], strict=True) if w is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *narrow = ctx.saved_tensors
        flat = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        wants_x, wants = ctx.needs_input_grad[0], ctx.needs_input_grad[1:]
        of_x: Tensor | None = None
        results: list[Tensor | None] = []
        with torch.autocast(flat[0].device.type, enabled=False):
            for i, (gradient, weight) in enumerate(zip(flat, narrow, strict=True)):
                if wants_x:
                    of_x = gradient @ weight if of_x is None else torch.addmm(of_x, gradient, weight)
                of_weight = wide_product(gradient.t(), x.reshape(-1, x.shape[-1])) if wants[4 * i] else None
                of_bias = gradient.sum(0, dtype=torch.float32) if wants[4 * i + 1] else None
                results += [of_weight, of_bias, None, None]
        shape = (*gradients[0].shape[:-1], narrow[0].shape[1])
        return None if of_x is None else of_x.view(shape), *results


def wide_product(left: Tensor, other: Tensor) -> Tensor:
    """`left @ other` in float32 from 16-bit matrices, without rounding the sums on a GPU."""
    if left.device.type == "cuda" and torch.version.hip is None:
        product: Tensor = torch.mm(left, other, out_dtype=torch.float32)
        return product
    return (left @ other).float()
