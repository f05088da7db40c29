"""One 16-bit copy of a model's linear layers and fused experts, made once a step and read by every pass of the learner, and by the sampler.

Autocast casts a float32 weight in each forward pass, again where activations are recomputed, and its gradient back: 15,564 casts in one
step of a 0.5B model on an H100. FSDP2's `MixedPrecisionPolicy` and torchtitan keep one cast a step in the same way: products read
16 bits, the master weights, their gradients and the optimizer are float32.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from covey.kernels.linear_products import Factors, multiply
from covey.models import autocast_dtype, compute_with, expert_weights, experts_forward

_Copy = tuple[Any, ...]
"""Weight [N, K] and bias [N] of a linear layer in 16 bits; weights [E, N, K] of fused experts."""

_samplers: WeakKeyDictionary[nn.Module, _Copy] = WeakKeyDictionary()
"""The sampler's copy of each layer, in memory that the learner may read and write."""


def share_copy(layer: nn.Module, *copies: Tensor | None) -> None:
    """Offer the sampler's copy of a layer, such as a part of a merged one, to `HalfWeights` of the model that holds the layer."""
    _samplers[layer] = tuple(map(_constant, copies))


def share_copies(pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
    """Offer the copies in the sampler's own modules on a GPU, each behind the module that it is a copy of."""
    for layer, mine in pairs:
        if (names := _names(layer)) and getattr(layer, names[0]).device.type == "cuda":
            share_copy(layer, *(getattr(mine, name) for name in names))


def _names(layer: nn.Module) -> tuple[str, ...]:
    """Names of what is copied of a linear layer or of fused experts."""
    return ("weight", "bias") if type(layer) is nn.Linear else expert_weights(layer)


def _constant(copy: Tensor | None) -> nn.Parameter | None:
    """A copy as a parameter, which stays where it is when activations are offloaded."""
    return None if copy is None else nn.Parameter(copy, requires_grad=False)


class HalfWeights:
    """The copy, in `dtype`, of the linear layers and fused experts of `model` that have float32 weights; layers of `leaves_out` have none.

    Adapted experts have none either: PEFT adds the adapter to their weights in each pass. Inside `fresh` each layer computes with its
    copy, and gradients reach the float32 parameters in float32. Outside, layers compute as they do without it.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, leaves_out: tuple[Any, ...] = ()) -> None:
        self.dtype = dtype
        self.is_fresh = False
        layers: list[Any] = list(model.modules())
        adapted = [layer.get_base_layer() for layer in layers if hasattr(layer, "parameter_name")]
        self.names = {
            layer: names
            for layer in layers
            if (names := _names(layer))
            and not any(layer is other for other in (*leaves_out, *adapted))
            and _is_free(layer.__dict__.get("forward"))
            and type(getattr(layer, names[0])) is nn.Parameter
            and getattr(layer, names[0]).dtype == torch.float32
        }
        """Names of what is copied of each layer."""
        self.copies: dict[nn.Module, _Copy] = {}
        self.sources: dict[nn.Module, tuple[int, ...]] = {}
        """Addresses of what was copied: inside of `fresh` other weights may be put in place for a pass, such as a reference's adapter."""
        for layer, names in self.names.items():
            forward = _forward if type(layer) is nn.Linear else _experts_forward
            layer.__dict__["forward"] = partial(forward, layer, self, names)

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

    def copy_for(self, layer: nn.Module, x: Tensor) -> _Copy | None:
        """The layer's copy, where a product of `x` may read it: inside of `fresh`, under autocast to its type, of the weights in place."""
        if not self.is_fresh or autocast_dtype(x.device.type) != self.dtype:
            return None
        return self.copies[layer] if self.sources.get(layer) == _addresses(self.weights_of(layer)) else None

    def weights_of(self, layer: nn.Module) -> _Copy:
        """Weights and biases of a layer, as they are, of which there is a copy."""
        return tuple(getattr(layer, name) for name in self.names[layer])

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights as they are now, in a few kernels, into memory that stays."""
        targets, sources = [], []
        for layer in self.names:
            weights = self.weights_of(layer)
            copy = self.copies[layer] = self._copy_of(layer, weights)
            self.sources[layer] = _addresses(weights)
            for target, source in zip(copy, weights, strict=True):
                if target is not None and source is not None:
                    targets.append(target)
                    sources.append(source.detach())
        if targets:
            torch._foreach_copy_(targets, sources)

    def _fits(self, copy: Tensor | None, weight: Tensor | None) -> bool:
        if copy is None or weight is None:
            return copy is weight
        return (copy.shape, copy.dtype, copy.device) == (weight.shape, self.dtype, weight.device)

    def _copy_of(self, layer: nn.Module, weights: _Copy) -> _Copy:
        """The sampler's memory where it fits, the memory of before, or new memory."""
        for candidate in (_samplers.get(layer), self.copies.get(layer)):
            if candidate is not None and all(map(self._fits, candidate, weights)):
                return candidate
        narrow = (None if weight is None else torch.empty_like(weight, dtype=self.dtype) for weight in weights)
        return tuple(map(_constant, narrow))


def _is_free(forward: Any) -> bool:
    """True for a layer without a `forward` of its own, but for that of `settle_products`."""
    return forward is None or getattr(forward, "func", None) is experts_forward


def _addresses(weights: _Copy) -> tuple[int, ...]:
    return tuple(weight.data_ptr() for weight in weights if weight is not None)


def _forward(linear: Any, half: HalfWeights, names: tuple[str, ...], x: Tensor) -> Tensor:
    copy = half.copy_for(linear, x)
    if copy is None:
        return F.linear(x, linear.weight, linear.bias)
    (out,) = multiply(x.to(half.dtype), Factors(linear.weight, linear.bias, *copy))
    return out


def _experts_forward(experts: nn.Module, half: HalfWeights, names: tuple[str, ...], x: Tensor, *args: Any) -> Any:
    copy = half.copy_for(experts, x)
    if copy is None:
        return experts_forward(experts, names, x, *args)
    pairs = zip(half.weights_of(experts), copy, strict=True)
    copied = {name: _Cast.apply(weight, narrow) for name, (weight, narrow) in zip(names, pairs, strict=True)}
    return compute_with(experts, copied, x, *args)


class _Cast(torch.autograd.Function):
    """`(weight, its copy in another type)` -> the copy, with the gradient of a cast."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return copy.view_as(copy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


def half_of(linear: nn.Module) -> HalfWeights | None:
    """The copies that this layer computes with."""
    forward = linear.__dict__.get("forward")
    return forward.args[1] if isinstance(forward, partial) and forward.func is _forward else None
