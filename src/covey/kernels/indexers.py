"""Indexers: layers that choose the keys of each token by further keys of their own. DeepSeek-AI 2025, "DeepSeek-V3.2"."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from covey.kernels.state_steps import has_states
from covey.models import unwrapped

LOCAL_LAYERS = ("sliding_attention", "chunked_attention")
"""Values of `config.layer_types` for layers with a window."""
INDEXED_LAYER = "indexed_attention"
"""The value for layers with an indexer."""
CHOICE = "indices"
"""Option with which these layers hand an attention function the places [B, L, k] of the keys that each token sees."""


def find_indexers(model: nn.Module) -> list[nn.Module]:
    """The indexers of a model: each chooses `index_topk` keys by those that transformers' cache keeps for it."""
    inputs_of = lambda module: inspect.signature(
        type(module).forward
    ).parameters.keys()  # packed rows replace an instance's
    modules = [module for module in model.modules() if hasattr(module, "index_topk")]
    return [module for module in modules if inputs_of(module) & {"cache", "past_key_values"}]


def other_layers(model: Any) -> set[str]:
    """The kinds of layers that are neither attention, with a window or an indexer or without, nor layers with a state."""
    inner = unwrapped(model)
    kinds = set(getattr(inner.config.get_text_config(), "layer_types", None) or ())
    if has_states(inner):
        return set()
    return kinds - {"full_attention", *LOCAL_LAYERS, *([INDEXED_LAYER] if find_indexers(inner) else [])}


@contextmanager
def choosing_few(model: Any, most: int = 2) -> Iterator[None]:
    """Context in which each indexer chooses at most so many keys, for a trial of fewer tokens than it chooses otherwise."""
    indexers: list[Any] = find_indexers(unwrapped(model))
    before = [indexer.index_topk for indexer in indexers]
    try:
        for indexer in indexers:
            indexer.index_topk = most
        yield
    finally:
        for indexer, count in zip(indexers, before, strict=True):
            indexer.index_topk = count


def is_chosen(places: Tensor, keys: int) -> Tensor:
    """[..., keys] bool, true at the `places` [..., k]."""
    return torch.zeros(*places.shape[:-1], keys, dtype=torch.bool, device=places.device).scatter_(
        -1, places.long(), True
    )


class IndexCache:
    """transformers' cache of a pass whose keys and values are kept elsewhere; `keep(layer, keys)` returns all keys of its indexer."""

    def __init__(self, keep: Callable[[int, Tensor], Tensor]) -> None:
        self.keep = keep

    def update(self, key: Tensor, value: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return key, value

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        return self.keep(layer_idx, indexer_key_states)
