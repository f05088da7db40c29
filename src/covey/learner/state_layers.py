"""The layers of a model that keep something from token to token, or choose keys: packed rows pass them by `shared_states`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from covey.kernels import cache_factory, cache_keyword, choices, find_indexers, has_states, tensors_on
from covey.learner.shared_prompt import loaded_with
from covey.learner.shared_states import AttentionLayer, IndexLayer, StateLayer
from covey.models import decoder_of, unwrapped
from covey.process.sharding import compute_device

_STATE_CALL = re.compile("(get|set|update)_(conv|recurrent|linear)_")
_KEYS_CALL = re.compile("update$")

_layers: WeakKeyDictionary[nn.Module, list[StateLayer]] = WeakKeyDictionary()
"""The layers of each model with a state or an indexer, for all policies that compute with it."""
_attention_layers: WeakKeyDictionary[nn.Module, list[StateLayer]] = WeakKeyDictionary()
"""The attention layers of each model that read whole rows, likewise."""


def state_layers(model: nn.Module) -> list[StateLayer]:
    """The layers that read a state from transformers' cache, or leave one on themselves, and indexers; [] for a model without."""
    inner = unwrapped(model)
    if inner not in _layers:
        indexers, block = find_indexers(inner), _parents(inner)
        stateful = _note_layers(inner) if has_states(inner) else []
        _layers[inner] = stateful + [
            IndexLayer(part, decoder_of(inner), block[part], None, "rows") for part in indexers
        ]
    return _layers[inner]


@contextmanager
def as_loaded(reference: Callable[[], Any]) -> Iterator[str]:
    """Context in which the switched model behind a weak reference attends as it was loaded; yields that implementation's name."""
    model = reference()
    config = model.config.get_text_config()
    now = config._attn_implementation
    config._attn_implementation = loaded_with.get(model, now)
    try:
        yield config._attn_implementation
    finally:
        config._attn_implementation = now


def attention_layers(model: nn.Module) -> list[StateLayer]:
    """The attention layers that choose keys, or all where none does, as they read whole rows under the model's own attention."""
    inner = unwrapped(model)
    if inner not in _attention_layers:
        block, choosing = _parents(inner), [module for module, _ in choices(inner)]
        modules, _ = _noted(inner, _KEYS_CALL)
        some = [module for module in modules if any(part in choosing for part in module.modules())]
        attending = partial(as_loaded, ref(inner))
        make = lambda module: AttentionLayer(
            module, decoder_of(inner), block[module], None, "rows", attending=attending
        )
        _attention_layers[inner] = [make(module) for module in some or modules]
    return _attention_layers[inner]


def _parents(inner: nn.Module) -> dict[nn.Module, nn.Module]:
    return {child: module for module in inner.modules() for child in module.children()}


def _note_layers(inner: nn.Module) -> list[StateLayer]:
    """The layers that read or write a state."""
    seen, held = _noted(inner, _STATE_CALL)
    block = _parents(inner)
    make = lambda module, keyword: StateLayer(module, decoder_of(inner), block[module], keyword)
    layers = [make(module, cache_keyword(module)) for module in _outermost(seen)]  # one inside passes by that around it
    return layers + [make(module, None) for module in _outermost(held)]


def _noted(inner: nn.Module, calls: re.Pattern[str]) -> tuple[list[nn.Module], list[nn.Module]]:
    """The innermost modules that call these methods of the cache in a forward pass, and those on which it leaves a tensor."""
    seen: dict[nn.Module, None] = {}
    stack: list[nn.Module] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs: stack.append(module)) for module in inner.modules()
    ]
    hooks += [
        module.register_forward_hook(lambda module, inputs, out: stack.remove(module), always_call=True)
        for module in inner.modules()
    ]
    before = dict(tensors_on(inner))
    training = inner.training
    inner.eval()
    try:
        cache = _noting(cache_factory(inner)(), calls, lambda: seen.setdefault(stack[-1]) if stack else None)
        ids = torch.zeros(1, 3, dtype=torch.int64, device=compute_device(next(inner.parameters())))
        with torch.no_grad():
            inner(input_ids=ids, use_cache=True, **{str(cache_keyword(inner)): cache})
    finally:
        inner.train(training)
        for hook in hooks:
            hook.remove()
    held = [key for key, x in tensors_on(inner) if before.get(key) is not x]
    for module, name in held:
        setattr(module, name, before.get((module, name)))
    return [module for module in seen if module is not inner], [module for module, _ in held]


def whole_row_layers(layers: Sequence[StateLayer]) -> str | None:
    """The sentence part that says which layers compute a prompt once a completion; None if none does."""
    whole = [layer for layer in layers if layer.way == "rows"]
    ways = {
        "which begin with no state": [layer for layer in whole if not isinstance(layer, IndexLayer | AttentionLayer)],
        "which choose keys of whole rows": [layer for layer in whole if isinstance(layer, IndexLayer)],
        "whose own attention reads whole rows": [layer for layer in whole if isinstance(layer, AttentionLayer)],
    }
    names = lambda layers: ", ".join(sorted({type(layer.module).__name__ for layer in layers}))
    parts = [f"in its layers {names(layers)} alone, {way}" for way, layers in ways.items() if layers]
    return " and ".join(parts) or None


def _noting(cache: Any, calls: re.Pattern[str], note: Callable[[], Any]) -> Any:
    """The cache, which calls `note` with each of these methods."""
    for name in filter(calls.match, dir(cache)):
        setattr(cache, name, _after(note, getattr(cache, name)))
    return cache


def _after(note: Callable[[], Any], method: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **options: Any) -> Any:
        note()
        return method(*args, **options)

    return noted


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that are no part of another one, each once."""
    unique = list(dict.fromkeys(modules))
    return [
        module
        for module in unique
        if not any(module is part for other in unique if other is not module for part in other.modules())
    ]
