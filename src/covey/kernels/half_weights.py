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
from torch.nn import functional as F

from covey.kernels.linear_products import Factors, multiply

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
    (out,) = multiply(x.to(half.dtype), Factors(linear.weight, linear.bias, *copy))
    return out


def half_of(linear: nn.Module) -> HalfWeights | None:
    """The copies that this layer computes with."""
    forward = linear.__dict__.get("forward")
    return forward.args[1] if isinstance(forward, partial) and forward.func is _forward else None
