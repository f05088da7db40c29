"""Decoder layers on a CPU with what stands between their products computed by kernels: norms, rotations, gated SiLUs.

The modules stay transformers' own, adapters included. Inside `fused(model)` those whose formula the kernels know compute it
in one pass over memory and keep less for the backward: a norm its input and one number a token, a gated layer the outputs
of its two projections. Each module is recognised by its values, on random numbers, and anything unknown is left as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from covey import products
from covey.compiled import why_not
from covey.compiled.layers import LANES, Kernels, kernels_for

ROTATION = "apply_rotary_pos_emb"
"""What transformers' models call to rotate queries and keys, a function of their module."""
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
"""The children of a layer whose norms are read by products alone, never by the residual stream."""
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_KEPT = "_covey_fused_layers"

Forward = Callable[..., Any]


class FusedLayers:
    """A context in which one model's layers compute by kernels. It may be entered inside itself."""

    def __init__(self, model: nn.Module) -> None:
        self._depth = 0
        self._forwards: list[tuple[nn.Module, Forward]] = []
        self._rotations: list[tuple[Any, Forward]] = []
        self._before: list[Forward] = []
        self._recognise(list(_layers(model)))

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        for module, forward in self._forwards:
            if "forward" not in module.__dict__:  # somebody else's, put there since
                module.__dict__["forward"] = forward
        # perhaps those of another model, inside whose context this one is
        self._before = [getattr(home, ROTATION) for home, _ in self._rotations]
        for home, rotated in self._rotations:
            setattr(home, ROTATION, rotated)

    def __exit__(self, *raised: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        for module, forward in self._forwards:
            if module.__dict__.get("forward") is forward:
                del module.__dict__["forward"]
        for (home, _), before in zip(self._rotations, self._before, strict=True):
            setattr(home, ROTATION, before)

    def __reduce__(self) -> Any:
        """A copy of the model recognises its own modules."""
        return type(None), ()

    @torch.no_grad()
    def _recognise(self, layers: list[Any]) -> None:
        """Which modules compute what the kernels do."""
        with torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
            for layer in layers:
                attention = layer.self_attn
                for norm in (layer.input_layernorm, layer.post_attention_layernorm, *_norms_of_heads(attention)):
                    if _is_norm(norm):
                        self._forwards.append((norm, partial(_normed, norm, norm.forward)))
                if _is_gated(layer.mlp):
                    self._forwards.append((layer.mlp, partial(_gated, layer.mlp, layer.mlp.forward)))
            for home in dict.fromkeys(sys.modules[type(layer.self_attn).__module__] for layer in layers):
                original = getattr(home, ROTATION, None)
                if isinstance(original, partial) and original.func is _rotated:
                    original = original.args[0]
                if original is not None and _is_rotation(original):
                    self._rotations.append((home, partial(_rotated, original)))


def faster(model: Any) -> AbstractContextManager[Any]:
    """Inside, this model computes by `products.FasterProducts` and `FusedLayers`, where its device has any.

    Not where its blocks are computed again by somebody's own means, outside of this context: both times must be alike.
    """
    return _Faster(model) if recomputes_inside(model) else nullcontext()


def recomputes_inside(model: Any) -> bool:
    """Whether whatever this model computes again is computed inside of `faster`."""
    return all(isinstance(found, Recomputing) for found in _contexts_of_recomputing(model))


class _Faster:
    """Both contexts, which may be entered again once they were left."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(products.faster_products(next(self.model.parameters()).device))
            stack.enter_context(fused(self.model))
            self.entered.append(stack.pop_all())

    def __exit__(self, *raised: Any) -> None:
        self.entered.pop().__exit__(*raised)


def fused(model: Any) -> AbstractContextManager[Any]:
    """`FusedLayers` of this model on a CPU that has the kernels, else a context that does nothing."""
    decoder = _decoder(model)
    if not _runs_here(decoder):
        return nullcontext()
    found = decoder.__dict__.get(_KEPT)
    if found is None:  # kept with the model, whose blocks it must find again when they are recomputed
        found = decoder.__dict__[_KEPT] = FusedLayers(decoder)
    assert isinstance(found, FusedLayers)
    return found


def _runs_here(decoder: nn.Module) -> bool:
    """Whether this model is on a CPU that can compile kernels, in a precision that they know."""
    first = next(decoder.parameters(), None)
    return first is not None and first.device.type == "cpu" and kernels_for(first.dtype, first.dtype) is not None


def would_fuse(model: Any) -> bool:
    """Whether a model of this shape, loaded or without storage, has layers that `fused` knows by name, on this machine."""
    layer = next(_layers(_decoder(model)), None)
    if layer is None or why_not() is not None or not _has_parts(layer.mlp):
        return False
    weight = getattr(layer.input_layernorm, "weight", None)
    if weight is None or _epsilon(layer.input_layernorm) is None or not _is_silu(getattr(layer.mlp, "act_fn", None)):
        return False
    return not len(weight) % LANES and not layer.mlp.down_proj.in_features % LANES


class Recomputing:
    """What `torch.utils.checkpoint` wants as `context_fn`: what is computed again must be saved as it was the first time.

    The autograd engine computes it outside of any context, so both times have the same ones.
    """

    def __init__(self, model: Any) -> None:
        self.decoder = _decoder(model)  # not the model, of which a copy of the decoder would copy the head too

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return _Faster(self.decoder), _Faster(self.decoder)


def _contexts_of_recomputing(model: nn.Module) -> Iterator[Any]:
    """What each block that keeps only its inputs enters to compute the rest."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            function = getattr(module, "_gradient_checkpointing_func", None)
            yield getattr(function, "keywords", {}).get("context_fn")


# -- what stands in a model -----------------------------------------------------------------------------------------


def _decoder(model: Any) -> nn.Module:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = inner.get_decoder() if hasattr(inner, "get_decoder") else inner
    return found if isinstance(found, nn.Module) else inner


def _layers(decoder: nn.Module) -> Iterator[Any]:
    for layer in getattr(decoder, "layers", ()):
        if {name for name, _ in layer.named_children()} == _LAYER:
            yield layer


def _norms_of_heads(attention: nn.Module) -> list[nn.Module]:
    """Of queries and keys, before they are rotated."""
    found = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return [norm for norm in found if norm is not None]


def _epsilon(norm: Any) -> float | None:
    found = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
    return found if isinstance(found, float) else None


def _is_norm(norm: Any) -> bool:
    """Whether it is the root-mean-square norm, times its weight."""
    epsilon, weight = _epsilon(norm), getattr(norm, "weight", None)
    if epsilon is None or "forward" in norm.__dict__ or not isinstance(weight, nn.Parameter) or not _is_plain(weight):
        return False
    if weight.ndim != 1 or len(weight) % LANES:
        return False
    x = torch.randn(3, len(weight)).to(weight.dtype)
    try:
        return _agree(norm.forward(x), F.rms_norm(x.float(), weight.shape, weight.float(), epsilon))
    except (RuntimeError, TypeError):
        return False


def _is_silu(function: Any) -> bool:
    x = torch.linspace(-3, 3, 7, device="cpu")
    return callable(function) and torch.allclose(function(x), F.silu(x))


def _has_parts(mlp: Any) -> bool:
    return all(isinstance(getattr(mlp, name, None), nn.Module) for name in _PROJECTIONS)


def _is_gated(mlp: Any) -> bool:
    """Whether it computes `down(silu(gate(x)) * up(x))`, without dropping anything at random."""
    if "forward" in mlp.__dict__ or not _has_parts(mlp) or not _is_silu(getattr(mlp, "act_fn", None)):
        return False
    weight = next(mlp.parameters())
    if not _is_plain(weight) or weight.ndim != 2 or not weight.is_floating_point():
        return False
    x = torch.randn(3, weight.shape[1]).to(weight.dtype)
    modes = {module: module.training for module in mlp.modules()}
    mlp.train()
    for name in _PROJECTIONS:  # an adapter's own dropout is applied either way
        getattr(mlp, name).eval()
    try:
        return _agree(mlp.forward(x), mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)))
    except (RuntimeError, TypeError):
        return False
    finally:
        for module, mode in modes.items():
            module.training = mode


def _is_rotation(function: Forward) -> bool:
    """Whether it rotates queries and keys by halves."""
    query, key, cosines, sines = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), *torch.randn(2, 1, 3, 8)
    turned = lambda x: torch.cat([-x[..., 4:], x[..., :4]], -1)
    try:
        found = function(query, key, cosines, sines)
    except (RuntimeError, TypeError, ValueError):
        return False
    return all(_agree(one, x * cosines + turned(x) * sines) for one, x in zip(found, (query, key), strict=True))


def _agree(one: Tensor, two: Tensor) -> bool:
    """To rounding, as a share of the largest number; zeros say nothing."""
    top = float(two.abs().max())
    slack = 1e-4 if one.dtype == torch.float32 else 3e-2
    return one.shape == two.shape and top > 0 and float((one.float() - two.float()).abs().max()) < slack * top


# -- what they compute ----------------------------------------------------------------------------------------------


def _products_type(x: Tensor) -> torch.dtype:
    """What the products that read `x` are computed in."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype


def _is_plain(*tensors: Any) -> bool:
    """Whether the kernels may read them: in a CPU's memory, no subclass that spreads a tensor over processes."""
    return all(type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" for x in tensors)


def _is_watched(module: nn.Module) -> bool:
    """Whether somebody has hooked into it, or put a `forward` of their own there."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in module.__dict__ or any(getattr(module, name) for name in hooks)


def _normed(norm: Any, original: Forward, x: Tensor) -> Any:
    dtype = _products_type(x)
    fits = _is_plain(x, norm.weight) and x.is_contiguous() and _products_type(norm.weight) == dtype
    kernels = kernels_for(x.dtype, dtype) if fits else None
    return original(x) if kernels is None else _Norm.apply(x, norm.weight, _epsilon(norm), dtype, kernels)


def _gated(mlp: Any, original: Forward, x: Tensor) -> Any:
    if _is_watched(mlp.act_fn):
        return original(x)
    gate, up, down = mlp.gate_proj(x), mlp.up_proj(x), mlp.down_proj
    fits = _is_plain(gate, up) and up.dtype == gate.dtype and not gate.shape[-1] % LANES
    kernels = kernels_for(gate.dtype, gate.dtype) if fits else None
    if kernels is None:
        return down(mlp.act_fn(gate) * up)
    gate, up = gate.contiguous(), up.contiguous()
    if type(down) is nn.Linear and _is_plain(down.weight) and not _is_watched(down):
        return _GatedDown.apply(gate, up, down.weight, down.bias, kernels)
    return down(_Gate.apply(gate, up, kernels))


def _rotated(
    original: Forward, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor, *more: Any, **kinds: Any
) -> Any:
    size = query.shape[-1]
    angles = (torch.Size([batch, query.shape[2], size]) for batch in (1, len(query)))
    fits = not more and not kinds and _is_plain(query, key, cosines, sines) and query.dtype == key.dtype
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
        inner = kernels.gate(gate, up)
        known = weight if products.in_pairs(inner, weight) else weight.to(gate.dtype)
        ctx.save_for_backward(gate, up, known)
        ctx.kernels, ctx.dtype, ctx.bias = kernels, weight.dtype, None if bias is None else bias.dtype
        return products.forward(inner, known, bias)

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
