"""Attention windows of a model's layers (sliding or chunked), found by probing its own masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from covey.errors import Unsupported
from covey.kernels.indexers import CHOICE, LOCAL_LAYERS, find_indexers
from covey.models import evaluating

PROBE = "covey_probe"
"""Name of the probe in transformers' attention and mask interfaces."""

UNDERSTOOD = ("position_ids", "s_aux")
"""Further tensors that a layer may hand to its attention: positions, which are rotated in before, and attention sinks."""

Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True)
class Window:
    """Keys that a token of a local layer sees: the last `size` with its own, or those of its chunk of `size` positions."""

    size: int
    is_chunked: bool = False

    def first(self, position: Position) -> Position:
        """Position of the first key that the token at `position` sees; may be negative."""
        return position - position % self.size if self.is_chunked else position - self.size + 1

    def hides(self, positions: int) -> bool:
        """True if a text of `positions` tokens has a token that does not see all before it."""
        return positions > self.size


def attention_windows(model: Any) -> dict[int, Window | None]:
    """The window of each attention layer by its index; None for a layer with full causal attention.

    One forward pass of two tokens, which probes transformers' mask functions at distant tokens; {} for a model without transformers'
    attention interface. Raises Unsupported for a mask that is neither causal nor a causal window, and for keys chosen by
    their content, by a mask that a layer makes or an argument that only its own attention reads. The choice of `find_indexers` is read.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    windows: dict[int, Window | None] = {}
    masks: dict[int, Tensor] = {}
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()
    understood = (*UNDERSTOOD, *([CHOICE] if find_indexers(model) else []))

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        index = getattr(module, "layer_idx", None)
        if unknown := [name for name, x in options.items() if isinstance(x, Tensor) and name not in understood]:
            raise Unsupported(f"its layers attend with {unknown[0]}")
        if index is not None:
            if isinstance(attention_mask, Tensor) and attention_mask.data_ptr() not in masks:
                raise Unsupported("its layers choose the keys that a token sees")
            size = options.get("sliding_window")
            windows[index] = getattr(attention_mask, "covey_window", None if size is None else Window(int(size)))
            if windows[index] is None and index < len(kinds) and kinds[index] in LOCAL_LAYERS:
                raise Unsupported(f"layer {index} has {kinds[index]}, but its mask shows no window")
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    def mask(*args: Any, **options: Any) -> Tensor:
        made = _probe_mask(**options)
        masks[made.data_ptr()] = made
        return made

    AttentionInterface.register(PROBE, attend)
    AttentionMaskInterface.register(PROBE, mask)
    before = config._attn_implementation
    config._attn_implementation = PROBE
    try:
        with evaluating(model):
            model(
                input_ids=torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device), use_cache=False
            )
    finally:
        config._attn_implementation = before
    return windows


def _probe_mask(**options: Any) -> Tensor:
    """A mask with its window as an attribute, of the type that a layer would turn it into."""
    device = options.get("device") or "cpu"
    mask = torch.zeros(1, 1, 1, 1, dtype=options.get("dtype"), device=device)
    mask.covey_window = _window_of(options["mask_function"], options.get("local_size"), device)  # type: ignore[attr-defined]
    return mask


def _window_of(sees: Any, size: int | None, device: Any) -> Window | None:
    """The window of a mask function (batch, head, query, key) -> bool, judged at the edges of windows of `size`."""
    edges = {place + step for place in (0, *(k * (size or 5) for k in (1, 2, 3))) for step in (-1, 0, 1, 2)}
    places = torch.tensor(sorted(edge for edge in edges if edge >= 0), device=device)
    query, key = places[:, None], places[None]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    seen = sees(zero, zero, query, key)
    windows = [None] if size is None else [Window(int(size)), Window(int(size), is_chunked=True), None]
    for window in windows:
        expected = key <= query
        if window is not None:
            expected = expected & (key >= window.first(query))
        if torch.equal(seen.expand_as(expected), expected):
            return window
    raise Unsupported("a layer's mask is neither causal nor a window of that")
