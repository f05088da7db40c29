"""Models whose layers keep a state other than keys and values: how they are told, and transformers' cache of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from covey.models import accepts, unwrapped


def has_states(model: Any) -> bool:
    """True if transformers gives some layer of the model a cache that is not of keys and values alone."""
    from transformers import DynamicCache

    if cache_keyword(model) is None:
        return False
    try:
        layers = DynamicCache(config=unwrapped(model).config).layers
    except (AttributeError, KeyError, TypeError, ValueError):  # a kind of layer or configuration that it does not know
        return False
    return any(hasattr(layer, "conv_states") for layer in layers)


def cache_keyword(model: Any) -> str | None:
    """The keyword of the model's forward that takes transformers' cache; None if there is none."""
    return next((name for name in ("past_key_values", "cache_params") if accepts(model, name)), None)


@torch.no_grad()
def cache_factory(model: Any) -> Callable[[], Any]:
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
