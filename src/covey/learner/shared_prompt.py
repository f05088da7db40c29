"""Packed rows `[prompt | c1 | ... | cG]`: a prompt is computed once for all its completions, forward and backward.

A completion attends to the prompt and to itself, never to another completion, at the positions of an unpacked row, so values and
gradients equal those of single rows. Only attention pads, and the last token of a completion, which predicts nothing, is
not computed.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from covey.kernels import (
    CHOICE,
    AttentionHeads,
    AttentionProduct,
    Layout,
    SharedPromptAttention,
    Window,
    is_chosen,
)
from covey.learner import context_parallel
from covey.learner.packing import Row
from covey.learner.segments import Run, Segment, attend_unpacked, numbers_of
from covey.learner.segments import attend as attend_by_part
from covey.learner.shared_states import Unpacked
from covey.models.modalities import Placed, placed_inputs
from covey.process.context import ContextGroup
from covey.process.device import onto

logger = logging.getLogger(__name__)

ATTENTION = "covey"


@dataclass(frozen=True, eq=False)
class SharedRows:
    """One packed row of S tokens, in place of `PaddedRows`."""

    input_ids: Tensor
    """[1, S]"""
    position_ids: Tensor
    """[1, S]"""
    segments: tuple[Segment, ...]
    source: Tensor
    """[M], index of the hidden state that predicts each completion token; for the first one, the prompt's last token."""
    target: Tensor
    """[M]"""
    place: Tensor
    """[M], flat index into [N, T]."""
    shape: tuple[int, int]
    """(N, T)"""
    kernel: str = "own"
    """Kernel of the attention: own (one function, on a CPU; SDPA by part elsewhere), sdpa (always by part), flex."""
    windows: Mapping[int, Window | None] = field(default_factory=dict)
    """Windows of the model's layers by index."""
    masks: dict[Window | None, object] = field(default_factory=dict)
    """FlexAttention's block masks by window, created on first use."""
    heads: set[AttentionHeads] | None = None
    """If given, collects the shapes of the attention layers."""
    spans: tuple[tuple[int, int, int], ...] = ()
    """By row: indices of the prompt's first token and of the completion's, and the completion's tokens that are computed."""
    placed: tuple[Placed, ...] = ()
    """The prompts with media."""
    context: ContextGroup | None = None
    """Processes over which the tokens are shared out, see `context_parallel`; None: all are here."""

    @functools.cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Positions of all prompts and completions."""
        return tuple(segment.layout for segment in self.segments)

    @functools.cached_property
    def unpacked(self) -> Unpacked:
        """The tokens in batches of prompts and completions, for layers with a state."""
        return Unpacked(self.layouts, self.input_ids.device)

    @functools.cached_property
    def longest(self) -> int:
        """Tokens of the longest prompt with its completion."""
        return max(layout.length + max(layout.counts, default=0) for layout in self.layouts)

    def window_of(self, layer: int | None) -> Window | None:
        """The layer's window, if it masks anything in this row; else None."""
        window = None if layer is None else self.windows.get(layer)
        return window if window is not None and window.hides(self.longest) else None

    def mask(self, window: Window | None) -> object:
        """FlexAttention's block mask under `window`; None for the other kernels."""
        if window not in self.masks:
            self.masks[window] = SharedPromptAttention.mask(self.layouts, self.kernel, self.input_ids.device, window)
        return self.masks[window]

    def spread(self, values: Tensor) -> Tensor:
        """[M] values of the completion tokens -> [N, T], 0 beyond each end. Differentiable."""
        size = self.shape[0] * self.shape[1]
        spare = int(self.context is not None)  # a place for positions that predict nothing
        flat = values.new_zeros(size + spare).index_put((self.place,), values)
        return (flat if self.context is None else self.context.sum(flat[:size])).view(self.shape)


def share_rows(rows: Sequence[Row], device: torch.device, kernel: str = "own", *, is_whole: bool = False) -> SharedRows:
    """Pack rows, those of one group after a single copy of their prompt. Values are returned in the order of `rows`.

    `is_whole`: a completion's last token is computed too, which predicts nothing but is routed to experts.
    For the kernel "flex", and on a CPU, the row is padded: to a whole block, or to one of few lengths. No token attends to it.
    """
    longest = max(row.completion.num_tokens for row in rows)
    groups: dict[tuple[int, int], list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.sharing, []).append(i)
    ids: list[Tensor] = []
    positions, source, place = list[Run](), list[Run](), list[Run]()
    target, segments, placed = [], [], []
    spans = dict[int, tuple[int, int, int]]()
    offset = 0
    for members in groups.values():
        prompt = rows[members[0]].prompt.token_ids
        ids.append(torch.tensor(prompt, dtype=torch.long))
        positions.append((0, len(prompt)))
        start, offset = offset, offset + len(prompt)
        last = offset - 1
        lengths = tuple(rows[i].completion.num_tokens if is_whole else rows[i].num_computed for i in members)
        segments.append(Segment(Layout(start, len(prompt), lengths), device))
        seen = rows[members[0]].placed
        if seen.media is not None:
            begins = [offset + sum(lengths[:i]) for i in range(len(lengths))]
            follows = tuple(zip(begins, lengths, strict=True))
            if seen is not rows[members[0]].prompt:  # a row by itself, placed as one
                seen, follows = replace(seen, token_ids=seen.token_ids[: len(prompt) + lengths[0]]), ()
            placed.append(Placed(seen, (start,), follows))
        for i, count in zip(members, lengths, strict=True):
            tokens = rows[i].completion.token_ids
            ids.append(tokens[:count])
            positions.append((len(prompt), count))
            source += [(last, min(1, len(tokens))), (offset, rows[i].num_computed)]
            spans[i] = start, offset, count
            target.append(tokens)
            place.append((i * longest, len(tokens)))
            offset += count
    padding = SharedPromptAttention.padding(offset, kernel, device)
    if padding:
        ids.append(torch.zeros(padding, dtype=torch.long))
        positions += [(0, 1)] * padding
        segments.append(Segment(Layout(offset, padding, ()), device))
    return SharedRows(
        input_ids=onto(device, torch.cat(ids)[None]),
        position_ids=onto(device, numbers_of(positions)[None]),
        segments=tuple(segments),
        source=onto(device, numbers_of(source)),
        target=onto(device, torch.cat(target)),
        place=onto(device, numbers_of(place)),
        shape=(len(rows), longest),
        kernel=kernel,
        placed=tuple(placed),
        spans=tuple(spans[i] for i in range(len(rows))),
    )


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    covey_rows: SharedRows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: `query` [1, H, S, D] -> [1, S, H, D].

    The model may be used without packed rows between a forward pass and its backward.
    """
    product = AttentionProduct(scaling, dropout, kwargs.get("softcap"), kwargs.get("s_aux"))
    chosen = kwargs.get(CHOICE)  # [1, S, k], places in the token's own row
    if covey_rows is None:
        return attend_unpacked(module, (query, key, value), attention_mask, product, kwargs)
    if covey_rows.context is not None:
        return context_parallel.attend(attention, module, (query, key, value), covey_rows, product)
    if covey_rows.heads is not None:
        covey_rows.heads.add(AttentionHeads.of(query, key, value, product.scale, product.sinks is not None))
    window = covey_rows.window_of(getattr(module, "layer_idx", None))
    kernel = covey_rows.kernel
    seen = None
    if chosen is not None and chosen.shape[-1] < covey_rows.longest:
        seen = is_chosen(chosen[0], covey_rows.unpacked.rows.shape[1])
    if seen is None and (window is None or kernel == "flex"):
        attended = SharedPromptAttention.attend(
            query, key, value, covey_rows.layouts, covey_rows.mask(window), kernel=kernel, product=product
        )
        if attended is not None:
            return attended, None
    parts = []
    for segment in covey_rows.segments:
        parts += attend_by_part(query[0], key[0], value[0], segment, window, product, seen)
    return torch.cat(parts)[None], None


def install() -> None:
    """Register the attention with transformers, with SDPA's masks for calls without packed rows."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)


def switch(model: Any) -> None:
    """Make this model attend through `attention` until `release`, which must follow the backward pass: checkpointing recomputes there."""
    config = model.config.get_text_config()
    if config._attn_implementation != ATTENTION:
        loaded_with[model] = config._attn_implementation
        config._attn_implementation = ATTENTION


def release(model: Any) -> None:
    """Undo `switch`."""
    if model in loaded_with:
        model.config.get_text_config()._attn_implementation = loaded_with.pop(model)


loaded_with: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The attention implementation with which each switched model was loaded."""


def forward_kwargs(rows: SharedRows, model: nn.Module) -> dict[str, Any]:
    """Keywords of the decoder's forward. The four-dimensional mask is never read; it keeps transformers from building one."""
    unread = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=rows.input_ids.device)
    kwargs: dict[str, Any] = {"input_ids": rows.input_ids, "position_ids": rows.position_ids}
    if rows.placed:
        place = {} if rows.context is None else {"rank": rows.context.rank, "size": rows.context.size}
        kwargs = placed_inputs(model, rows.input_ids, rows.position_ids, rows.placed, **place)
    return {**kwargs, "attention_mask": unread, "covey_rows": rows}
