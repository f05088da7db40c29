"""Decoder layers on a CPU with what stands between their products computed by kernels: residual sums, norms, rotations, gated SiLUs.

The modules stay transformers' own, adapters included. Inside `fused(model)` those whose formula the kernels know compute it
in one pass over memory and keep less for the backward: a norm its input and one number a token, a gated layer the outputs
of its two projections. Each module is recognised by its values, on random numbers, and anything unknown is left as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from covey import fused_operations as operations
from covey import products
from covey.compiled import why_not
from covey.compiled.layers import LANES, kernels_for
from covey.fused_operations import Forward, epsilon_of, is_plain, is_watched

ROTATION = "apply_rotary_pos_emb"
"""What transformers' models call to rotate queries and keys, a function of their module."""
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
"""The children of a layer whose norms are read by products alone, never by the residual stream."""
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_KEPT = "_covey_fused_layers"


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

    def _knows(self, module: nn.Module) -> bool:
        return any(module is known for known, _ in self._forwards)

    @torch.no_grad()
    def _recognise(self, layers: list[Any]) -> None:
        """Which modules compute what the kernels do."""
        with torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
            for layer in layers:
                attention = layer.self_attn
                for norm in (layer.input_layernorm, layer.post_attention_layernorm, *_norms_of_heads(attention)):
                    if _is_norm(norm):
                        self._forwards.append((norm, partial(operations.normed, norm, norm.forward)))
                if _is_gated(layer.mlp):
                    self._forwards.append((layer.mlp, partial(operations.gated, layer.mlp, layer.mlp.forward)))
                    if self._knows(layer.post_attention_layernorm) and _is_residual(layer):
                        self._forwards.append((layer, partial(operations.layer, layer, layer.forward)))
            for home in dict.fromkeys(sys.modules[type(layer.self_attn).__module__] for layer in layers):
                original = getattr(home, ROTATION, None)
                if isinstance(original, partial) and original.func is operations.rotated:
                    original = original.args[0]
                if original is not None and _is_rotation(original):
                    self._rotations.append((home, partial(operations.rotated, original)))


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
    if weight is None or epsilon_of(layer.input_layernorm) is None or not _is_silu(getattr(layer.mlp, "act_fn", None)):
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


def _is_norm(norm: Any) -> bool:
    """Whether it is the root-mean-square norm, times its weight."""
    epsilon, weight = epsilon_of(norm), getattr(norm, "weight", None)
    if epsilon is None or "forward" in norm.__dict__ or not isinstance(weight, nn.Parameter) or not is_plain(weight):
        return False
    if weight.ndim != 1 or len(weight) % LANES:
        return False
    x = torch.randn(3, len(weight)).to(weight.dtype)
    try:
        return _agree(norm.forward(x), F.rms_norm(x.float(), weight.shape, weight.float(), epsilon))
    except (RuntimeError, TypeError):
        return False


def _is_residual(layer: Any) -> bool:
    """Whether it computes `y + mlp(norm(y))` of `y = x + attention(norm(x))`, and attention hears what the layer is told."""
    names = ("attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings")
    told = {name: object() for name in names}
    heard: dict[str, Any] = {}

    def attend(hidden_states: Tensor, **named: Any) -> tuple[Tensor, None]:
        heard.update(named)
        return 1.5 * hidden_states, None

    parts = {layer.self_attn: attend, layer.mlp: lambda x: -0.5 * x}
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    has_own = next(layer.parameters(recurse=False), None) is not None
    if has_own or any(is_watched(module) for module in (layer, first, second, *parts)):
        return False
    x = torch.randn(1, 3, len(first.weight)).to(first.weight.dtype)
    before = {name: layer.__dict__[name] for name in ("training", "gradient_checkpointing") if name in layer.__dict__}
    try:
        layer.__dict__.update(training=True, gradient_checkpointing=False)  # so that what is dropped at random is seen
        for module, forward in parts.items():
            module.__dict__["forward"] = forward
        found = layer.forward(x, **told)
    except Exception:  # noqa: BLE001 - the border to foreign code, to which these parts are no attention
        return False
    finally:
        del layer.__dict__["gradient_checkpointing"]
        layer.__dict__.update(before)
        for module in parts:
            module.__dict__.pop("forward", None)
    y = x + 1.5 * first.forward(x)
    is_told = heard.keys() == told.keys() and all(heard[name] is told[name] for name in told)
    return is_told and isinstance(found, Tensor) and _agree(found, y - 0.5 * second.forward(y))


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
    if not is_plain(weight) or weight.ndim != 2 or not weight.is_floating_point():
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
