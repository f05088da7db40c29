"""Faster forward and backward passes of a transformers model on a CPU: fused norms and gated MLPs, faster matmuls.

The modules stay transformers' own, adapters included. Inside `learning(model)` recognised modules run in fused kernels,
which also save less for the backward pass: a norm its input and one number per token, a gated MLP the outputs of its two
projections. A module is recognised by comparing its output with the formula on random inputs; others are not changed.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F

from covey.kernels import fused_functions as operations
from covey.kernels.compile import is_fake, unavailable_reason
from covey.kernels.fused_functions import Forward, is_plain
from covey.kernels.fused_layers import is_norm, recognisable_layers
from covey.kernels.fused_ops import LANES, layer_kernels
from covey.kernels.gates import SILU, Gate, has_projections, recognised_gate
from covey.kernels.matmul import FasterLinears
from covey.kernels.norms import epsilon_of
from covey.models import decoder_of


class FusedLayers:
    """A context in which one model's decoder layers run in fused kernels. Reentrant."""

    def __init__(self, model: nn.Module) -> None:
        self._depth = 0
        self._forwards: list[tuple[nn.Module, Forward]] = []
        self._recognise(list(recognisable_layers(model)))

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        for module, forward in self._forwards:
            if "forward" not in module.__dict__:  # replaced by others since
                module.__dict__["forward"] = forward

    def __exit__(self, *raised: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        for module, forward in self._forwards:
            if module.__dict__.get("forward") is forward:
                del module.__dict__["forward"]

    @torch.no_grad()
    def _recognise(self, layers: list[Any]) -> None:
        """Find the modules that the kernels implement."""
        with torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
            for layer in layers:
                attention = layer.self_attn
                for norm in (layer.input_layernorm, layer.post_attention_layernorm, *_norms_of_heads(attention)):
                    if is_norm(norm) and is_plain(norm.weight) and not len(norm.weight) % LANES:
                        self._forwards.append((norm, partial(operations.normed, norm, norm.forward)))
                if (
                    recognised_gate(layer.mlp) == Gate(SILU)
                    and _is_silu(getattr(layer.mlp, "act_fn", None))
                    and is_plain(next(layer.mlp.parameters()))
                ):
                    self._forwards.append((layer.mlp, partial(operations.gated, layer.mlp, layer.mlp.forward)))


def learning(model: nn.Module) -> AbstractContextManager[Any]:
    """A context in which this model's forward and backward passes run faster on a CPU; elsewhere it does nothing.

    Linear layers compute `matmul.faster_linear`, and recognised decoder layers run in fused kernels. Both are restored on
    exit. A no-op if activations are recomputed by another `context_fn` than `Recomputing`: forward and recomputation must
    use the same kernels.
    """
    return _Learning(model) if _recomputes_inside(model) else nullcontext()


def _recomputes_inside(model: nn.Module) -> bool:
    """True if every block with activation checkpointing recomputes inside `learning`."""
    return all(isinstance(context, Recomputing) for context in _contexts_of_recomputing(model))


class _Learning:
    """`FasterLinears` and `FusedLayers` of these modules; reusable and reentrant, because a graph may be traversed twice."""

    def __init__(self, *modules: nn.Module) -> None:
        self.modules = modules
        self.entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for module in self.modules:
                stack.enter_context(FasterLinears(module.modules()))
                stack.enter_context(fused(module))
            self.entered.append(stack.pop_all())

    def __exit__(self, *raised: Any) -> None:
        self.entered.pop().__exit__(*raised)


def fused(model: nn.Module) -> AbstractContextManager[Any]:
    """`FusedLayers` of this model on a CPU that has the kernels, else a context that does nothing."""
    decoder = decoder_of(model)
    if not _runs_here(decoder):
        return nullcontext()
    if decoder not in _fused:  # one per decoder, so that recomputed blocks re-enter the same one
        _fused[decoder] = FusedLayers(decoder)
    return _fused[decoder]


_fused: WeakKeyDictionary[nn.Module, FusedLayers] = WeakKeyDictionary()


def _runs_here(decoder: nn.Module) -> bool:
    """True for a model with decoder layers on a CPU that can compile the kernels, in a supported dtype."""
    first = next(decoder.parameters(), None)
    if (
        first is None
        or first.device.type != "cpu"
        or is_fake(first)
        or next(recognisable_layers(decoder), None) is None
    ):
        return False
    return layer_kernels(first.dtype, first.dtype) is not None


def would_fuse(model: Any) -> bool:
    """True if `fused` will recognise this model's layers on this machine, judged by names and sizes (no storage needed)."""
    layer = next(recognisable_layers(decoder_of(model)), None)
    if layer is None or unavailable_reason() is not None or not has_projections(layer.mlp):
        return False
    weight = getattr(layer.input_layernorm, "weight", None)
    if weight is None or epsilon_of(layer.input_layernorm) is None or not _is_silu(getattr(layer.mlp, "act_fn", None)):
        return False
    return not len(weight) % LANES and not layer.mlp.down_proj.in_features % LANES


class Recomputing:
    """A `context_fn` for `torch.utils.checkpoint`: recomputation runs inside `learning`, like the first forward.

    Autograd recomputes activations outside any context, so the checkpoint must enter one itself.
    """

    def __init__(self, *modules: nn.Module) -> None:
        # decoders alone: copying a decoder, which holds this object, must not copy the head
        self.modules = tuple(map(decoder_of, modules))

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return _Learning(*self.modules), _Learning(*self.modules)


def _contexts_of_recomputing(model: nn.Module) -> Iterator[Any]:
    """The `context_fn` of each block with gradient checkpointing."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            function = getattr(module, "_gradient_checkpointing_func", None)
            yield getattr(function, "keywords", {}).get("context_fn")


# -- recognising modules --- -----------------------------------------------------------------------------------------


def _norms_of_heads(attention: nn.Module) -> list[nn.Module]:
    """Norms of queries and keys before rotation, if any."""
    norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return [norm for norm in norms if norm is not None]


def _is_silu(function: Any) -> bool:
    x = torch.linspace(-3, 3, 7, device="cpu")
    return callable(function) and torch.allclose(function(x), F.silu(x))
