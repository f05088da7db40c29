"""Decode steps of recurrent layers on a CPU, in place: transformers' reference writes ten tensors as large as the state."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from covey.models import accepts, unwrapped

StateStep: TypeAlias = tuple[Any, str, Callable[..., Any]]
"""(Python module, name in it, replacement)"""


def state_steps(model: nn.Module) -> list[StateStep]:
    """The functions that `in_place_steps` replaces for this model: (Python module, name, replacement). None on an accelerator."""
    if next(model.parameters()).device.type != "cpu":
        return []
    sources = {sys.modules[type(module).__module__] for module in model.modules()}
    return [
        (source, name, make(getattr(source, name)))
        for source in sources
        for name, make in _STEPS.items()
        if source.__name__.startswith("transformers.") and hasattr(source, name)
    ]


_replaced: dict[tuple[str, str], tuple[int, Callable[..., Any]]] = {}
"""By module and name: the contexts that replace the function now, and the function."""
_lock = threading.Lock()


@contextmanager
def in_place_steps(steps: list[StateStep]) -> Iterator[None]:
    """Context in which transformers' layers call these functions. Without gradients states are overwritten.

    Contexts may overlap, as those of engines in several threads: the last one that ends puts transformers' functions back.
    """
    with _lock:
        for source, name, replacement in steps:
            count, function = _replaced.get((source.__name__, name), (0, getattr(source, name)))
            _replaced[source.__name__, name] = (count + 1, function)
            if not count:
                setattr(source, name, replacement)
    try:
        yield
    finally:
        with _lock:
            for source, name, _ in steps:
                count, function = _replaced.pop((source.__name__, name))
                if count > 1:
                    _replaced[source.__name__, name] = (count - 1, function)
                else:
                    setattr(source, name, function)


def _must_keep(state: Tensor, inputs: Tensor) -> bool:
    """True for a state that gradients need as it was, and for one of which there are no such views."""
    has_gradients = torch.is_grad_enabled() and (state.requires_grad or inputs.requires_grad)
    return has_gradients or not state.is_contiguous()


def gated_delta_step(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The gated delta rule, of one token a row. Yang et al. 2024, "Gated Delta Networks"."""

    def step(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        **options: Any,
    ) -> Any:
        """([R, 1, H, V], state [R, H, K, V]) from `query`, `key` [R, 1, Hk, K], `value` [R, 1, H, V] and `g`, `beta` [R, 1, H]."""
        state = initial_state
        if state is None or query.shape[1] > 1 or state.dtype != torch.float32 or _must_keep(state, value):
            return reference(
                query,
                key,
                value,
                g,
                beta,
                initial_state=state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                **options,
            )
        rows, heads, width, _ = state.shape
        query, key = query[:, 0].float(), key[:, 0].float()
        if use_qk_l2norm_in_kernel:
            query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
        query, key = (
            x.repeat_interleave(heads // x.shape[1], 1).reshape(rows * heads, 1, width)
            for x in (query * width**-0.5, key)
        )
        now = state.view(rows * heads, width, -1)
        now *= g[:, 0].float().exp().view(-1, 1, 1)
        delta = (value[:, 0].float().reshape(len(now), 1, -1) - key @ now) * beta[:, 0].float().view(-1, 1, 1)
        now.baddbmm_(key.mT, delta)
        out = (query @ now).view(rows, 1, heads, -1)
        return out.to(value.dtype), state

    return step


def mamba2_step(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The state space of Mamba2, of one token a row. Dao & Gu 2024, "Transformers are SSMs"."""

    def step(
        state: Tensor,
        hidden: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        **options: Any,
    ) -> Tensor:
        """[R, H, P] from `state` [R, H, P, N], `hidden` [R, H, P], `B`, `C` [R, G, N]; a head has one `dt` and one `A`."""
        one_a_head = all(x.stride(i) == 0 for x, axes in ((dt, (-1,)), (A, (-1, -2))) for i in axes)
        one_a_head &= dt_bias is not None and dt_bias.stride(-1) == 0
        if not one_a_head or state.dtype != torch.float32 or _must_keep(state, hidden):
            options |= {"z": z, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
            y: Tensor = reference(state, hidden, dt, A, B, C, D, **options)
            return y
        assert dt_bias is not None
        rows, heads, width, size = state.shape
        span = dt[..., 0] + dt_bias[..., 0].to(dt.dtype)
        span = (F.softplus(span) if dt_softplus else span).float()  # [R, H]
        inputs, outputs = (x.float().repeat_interleave(heads // x.shape[1], 1).view(rows * heads, size) for x in (B, C))
        now = state.view(rows * heads, width, size)
        now *= (span * A[:, 0, 0].float()).exp().view(-1, 1, 1)
        x = (hidden.float() * span[..., None]).view(rows * heads, width, 1)
        now.baddbmm_(x, inputs[:, None])
        out = (outputs[:, None] @ now.mT).view(rows, heads, width).to(hidden.dtype)  # MKL is slow at now @ outputs
        out = out if D is None else (out + hidden * D).to(hidden.dtype)
        return out if z is None else (out * F.silu(z)).to(hidden.dtype)

    return step


_STEPS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "torch_recurrent_gated_delta_rule": gated_delta_step,
    "mamba2_selective_state_update": mamba2_step,
}
"""Names in transformers' modeling files, and what replaces them."""


def has_states(model: nn.Module) -> bool:
    """True if transformers gives some layer of the model a cache that is not of keys and values alone."""
    from transformers import DynamicCache

    if cache_keyword(model) is None:
        return False
    try:
        layers = DynamicCache(config=unwrapped(model).config).layers
    except (AttributeError, KeyError, TypeError, ValueError):  # a kind of layer or configuration that it does not know
        return False
    return any(hasattr(layer, "conv_states") for layer in layers)


def cache_keyword(module: nn.Module) -> str | None:
    """Keyword of the forward that takes transformers' cache: `cache` since 5.24; None if there is none."""
    return next((name for name in ("cache", "past_key_values", "cache_params") if accepts(module, name)), None)


@torch.no_grad()
def cache_factory(model: nn.Module) -> Callable[[], Any]:
    """Maker of empty caches of the class that the model makes for itself, found by a forward pass of two tokens."""
    from transformers import DynamicCache

    inner = unwrapped(model)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(inner.parameters()).device)
    made = getattr(inner(input_ids=ids, use_cache=True), str(cache_keyword(inner)), None)
    if made is None or type(made) is DynamicCache:
        return lambda: DynamicCache(config=inner.config)
    return type(made)


def tensors_on(model: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
    """Tensors that are attributes of modules, parameters and buffers left out: ((module, name), tensor)."""
    for module in model.modules():
        for name, x in list(vars(module).items()):
            if isinstance(x, Tensor):
                yield (module, name), x
