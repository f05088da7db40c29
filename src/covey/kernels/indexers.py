"""Indexers: layers that choose the keys of each token by further keys of their own. DeepSeek-AI 2025, "DeepSeek-V3.2"."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from covey.kernels.state_steps import has_states
from covey.models import evaluating, unwrapped
from covey.process.sharding import compute_device

LOCAL_LAYERS = ("sliding_attention", "chunked_attention")
"""Values of `config.layer_types` for layers with a window."""
INDEXED_LAYER = "indexed_attention"
"""The value for layers with an indexer."""
COUNTS = (
    ("index_topk",),
    ("keep_window_size",),
    ("topk_blocks", "block_size"),
    ("block_topk", "compress_ratio", "token_budget"),
)
"""Attributes of modules that choose keys: the number of keys or blocks, the size of a block, and the keys of all blocks."""
BLOCK = 2
"""Keys of a block in a trial."""
CHOICE = "indices"
"""Option with which these layers hand an attention function the places [B, L, k] of the keys that each token sees."""


def find_indexers(model: nn.Module) -> list[nn.Module]:
    """The indexers of a model: each chooses `index_topk` keys by those that transformers' cache keeps for it."""
    inputs_of = lambda module: inspect.signature(
        type(module).forward
    ).parameters.keys()  # packed rows replace an instance's
    modules = [module for module in model.modules() if hasattr(module, "index_topk")]
    return [module for module in modules if inputs_of(module) & {"cache", "past_key_values"}]


def other_layers(model: nn.Module) -> set[str]:
    """The kinds of layers that are neither attention, with a window or an indexer or without, nor layers with a state."""
    inner = unwrapped(model)
    kinds = set(getattr(inner.config.get_text_config(), "layer_types", None) or ())
    if has_states(inner):
        return set()
    return kinds - {"full_attention", *LOCAL_LAYERS, *([INDEXED_LAYER] if find_indexers(inner) else [])}


def choices(model: nn.Module) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """The modules that choose keys, or blocks of keys, by content, each with its attributes that say how many."""
    modules = [module for module in model.modules() if not hasattr(module, "index_topk")]
    indexers = [(module, ("index_topk",)) for module in find_indexers(model)]
    return indexers + [(module, names) for module in modules for names in COUNTS if all(map(vars(module).get, names))]


@contextmanager
def choosing_few(model: nn.Module, most: int = 2) -> Iterator[None]:
    """Context in which at most so many keys, or blocks of two, are chosen, for a trial of fewer tokens than are chosen otherwise."""
    modules = choices(unwrapped(model))
    before = [{name: getattr(module, name) for name in names} for module, names in modules]
    try:
        for module, (count, *size) in modules:
            setattr(module, count, most)
            for name, value in zip(size, (BLOCK, most * BLOCK), strict=False):
                setattr(module, name, value)
        yield
    finally:
        for (module, _), values in zip(modules, before, strict=True):
            for name, value in values.items():
                setattr(module, name, value)


def has_windows(model: nn.Module) -> bool:
    """True if the configuration gives layers a window."""
    config = unwrapped(model).config.get_text_config()
    is_local = {*LOCAL_LAYERS} & {*(getattr(config, "layer_types", None) or ())}
    return bool(is_local or getattr(config, "sliding_window", None))


@torch.no_grad()
def reason_against_choices(model: nn.Module) -> str | None:
    """Reason why no short trial shows the keys that the layers choose; None if one does, or none chooses."""
    inner = unwrapped(model)
    name = type(inner).__name__
    if not choices(inner):
        others = other_layers(inner)
        return f"{name} has layers of kind {', '.join(sorted(others))}" if others else None
    size = int(inner.config.get_text_config().vocab_size)
    ids = torch.randint(0, size, (1, 12), generator=torch.Generator().manual_seed(0))
    logits = []
    for most in (2, len(ids[0])):
        with evaluating(inner), choosing_few(inner, most):
            logits.append(inner(input_ids=ids.to(compute_device(next(inner.parameters())))).logits)
    return f"the keys that {name} chooses cannot be made few for a trial" if torch.equal(*logits) else None


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
