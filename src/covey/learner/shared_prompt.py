"""Packed rows `[prompt | c1 | ... | cG]`: a prompt is computed once for all its completions, forward and backward.

Completions see the prompt and themselves, never each other, and keep the positions they would have alone, so every number
and every gradient is that of one row at a time. There is no padding outside attention, and the last token of a completion, which
predicts nothing, is not computed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from covey.kernels import AttentionHeads, Layout, SharedPromptAttention
from covey.learner.packing import Row

logger = logging.getLogger(__name__)

ATTENTION = "covey"
_NOT_UNDERSTOOD = ("softcap", "s_aux", "position_bias", "cache")
"""What some models pass to their attention that the parts below do not compute."""


@dataclass(frozen=True, eq=False)
class Segment:
    """One prompt and its G completions inside a packed row of S tokens."""

    layout: Layout
    """The prompt's place, and how many tokens of each completion predict another; kernels need no more."""
    device: torch.device

    @functools.cached_property
    def index(self) -> Tensor:
        """[G, T], where each completion token that predicts another stands in the packed row; any valid place beyond a completion's end."""
        begins = self.layout.answers.start + self._counts.cumsum(0) - self._counts
        return torch.where(
            self.valid, begins[:, None] + self._steps, torch.tensor(self.layout.start, device=self.device)
        )

    @functools.cached_property
    def valid(self) -> Tensor:
        """[G, T] bool"""
        return self._steps < self._counts[:, None]

    @functools.cached_property
    def mask(self) -> Tensor:
        """[T, length + T] bool, what a completion token sees: the whole prompt, and its own completion up to itself."""
        prompt = torch.ones(len(self._steps), self.layout.length, dtype=torch.bool, device=self.device)
        return torch.cat([prompt, self._steps[:, None] >= self._steps], dim=1)

    @functools.cached_property
    def _counts(self) -> Tensor:
        return torch.tensor(self.layout.counts, dtype=torch.long, device=self.device)

    @functools.cached_property
    def _steps(self) -> Tensor:
        return torch.arange(max(self.layout.counts, default=0), device=self.device)


@dataclass(frozen=True, eq=False)
class SharedRows:
    """What `PaddedRows` is for padded rows, for one packed row of S tokens."""

    input_ids: Tensor
    """[1, S]"""
    position_ids: Tensor
    """[1, S]"""
    segments: tuple[Segment, ...]
    source: Tensor
    """[M], the place whose hidden state predicts each completion token; the first one's is the prompt's last."""
    target: Tensor
    """[M]"""
    place: Tensor
    """[M], flat index into [N, T]."""
    shape: tuple[int, int]
    """(N, T)"""
    kernel: str = "own"
    """What computes the attention: own (one function, on a CPU; SDPA by part elsewhere), sdpa (always by part), flex."""
    mask: Any = None
    """FlexAttention's."""
    heads: set[AttentionHeads] | None = None
    """Filled with what the layers look like, where it is wanted."""

    @functools.cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """The places of all prompts and completions."""
        return tuple(segment.layout for segment in self.segments)

    def spread(self, values: Tensor) -> Tensor:
        """[M] values of the completion tokens -> [N, T], 0 beyond each end. Differentiable."""
        flat = values.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_put((self.place,), values).view(self.shape)


def share_rows(rows: Sequence[Row], device: torch.device, kernel: str = "own") -> SharedRows:
    """Pack rows, those of the same group behind one copy of their prompt. Values come back in the order of `rows`.

    For the kernel "flex", and on a CPU, the row ends with padding of its own, which nothing sees: up to a whole block, or to
    lengths of which there are few.
    """
    longest = max(row.completion.num_tokens for row in rows)
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.group, []).append(i)
    ids: list[Tensor] = []
    positions, source, place = list[_Run](), list[_Run](), list[_Run]()
    target, segments = [], []
    offset = 0
    for members in groups.values():
        prompt = rows[members[0]].prompt.token_ids
        ids.append(torch.tensor(prompt, dtype=torch.long))
        positions.append((0, len(prompt)))
        start, offset = offset, offset + len(prompt)
        last = offset - 1
        lengths = tuple(rows[i].num_computed for i in members)
        segments.append(Segment(Layout(start, len(prompt), lengths), device))
        for i, count in zip(members, lengths, strict=True):
            tokens = rows[i].completion.token_ids
            ids.append(tokens[:count])
            positions.append((len(prompt), count))
            source += [(last, min(1, len(tokens))), (offset, count)]
            target.append(tokens)
            place.append((i * longest, len(tokens)))
            offset += count
    padding = SharedPromptAttention.padding(offset, kernel, device)
    if padding:
        ids.append(torch.zeros(padding, dtype=torch.long))
        positions += [(0, 1)] * padding
        segments.append(Segment(Layout(offset, padding, ()), device))
    layouts = [segment.layout for segment in segments]
    return SharedRows(
        input_ids=torch.cat(ids)[None].to(device),
        position_ids=_numbers(positions)[None].to(device),
        segments=tuple(segments),
        source=_numbers(source).to(device),
        target=torch.cat(target).to(device),
        place=_numbers(place).to(device),
        shape=(len(rows), longest),
        kernel=kernel,
        mask=SharedPromptAttention.mask(layouts, kernel, device),
    )


_Run = tuple[int, int]
"""A number, and how many from there on."""


def _numbers(runs: Sequence[_Run]) -> Tensor:
    """[sum of all counts] int64, the numbers of these runs, one after another."""
    firsts, counts = torch.tensor(runs, dtype=torch.long).T
    before = counts.cumsum(0) - counts
    return torch.arange(int(counts.sum())) + (firsts - before).repeat_interleave(counts)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    covey_rows: SharedRows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: `query` [1, H, S, D] -> [1, S, H, D]. Without packed rows it is SDPA as usual."""
    if covey_rows is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    for name in _NOT_UNDERSTOOD:
        if kwargs.get(name) is not None:
            raise ValueError(f"its attention uses {name}")
    if covey_rows.heads is not None:
        covey_rows.heads.add(_heads_of(query, key, value))
    attended = SharedPromptAttention.attend(
        query, key, value, covey_rows.layouts, covey_rows.mask, kernel=covey_rows.kernel, scale=scaling, dropout=dropout
    )
    if attended is not None:
        return attended, None
    repeats = query.shape[1] // key.shape[1]
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scaling}
    parts = []
    for segment in covey_rows.segments:
        parts += _attend(query[0], key[0], value[0], segment, repeats, options)
    return torch.cat(parts)[None], None


def _heads_of(query: Tensor, key: Tensor, value: Tensor) -> AttentionHeads:
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    return AttentionHeads(query.shape[1], key.shape[1], query.shape[3], value.shape[3], dtype, query.device)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, segment: Segment, repeats: int, options: dict[str, Any]
) -> list[Tensor]:
    """[length, H, D] of the prompt's tokens and [sum T_i, H, D] of the completions', from [H, S, D]."""
    options = {**options, "enable_gqa": True} if repeats > 1 else options
    own = lambda x: x[:, segment.layout.prompt][None]  # [1, H, length, D]
    prompt = F.scaled_dot_product_attention(own(query), own(key), own(value), is_causal=True, **options)
    count, longest = segment.index.shape
    if not segment.index.numel():
        return [prompt[0].transpose(0, 1)]
    flat = segment.index.flatten()
    pick = lambda x: x[:, flat].view(x.shape[0], count, longest, x.shape[2]).transpose(0, 1)  # [G, H, T, D]
    keys = torch.cat([own(key).expand(count, -1, -1, -1), pick(key)], dim=2)
    values = torch.cat([own(value).expand(count, -1, -1, -1), pick(value)], dim=2)
    answers = F.scaled_dot_product_attention(pick(query), keys, values, attn_mask=segment.mask, **options)
    return [prompt[0].transpose(0, 1), answers.transpose(1, 2)[segment.valid]]


def install() -> None:
    """Make the attention known to transformers, with SDPA's masks for calls without packed rows."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)


def switch(model: Any) -> None:
    """Let this model attend by `attention` until `release`; gradient checkpointing calls it again in the backward pass."""
    config = model.config.get_text_config()
    if config._attn_implementation != ATTENTION:
        _before[model] = config._attn_implementation
        config._attn_implementation = ATTENTION


def release(model: Any) -> None:
    """Undo `switch`."""
    if model in _before:
        model.config.get_text_config()._attn_implementation = _before.pop(model)


_before: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The attention implementation that each switched model had."""


def drops(model: Any) -> bool:
    """Whether attention drops weights at random while the model trains."""
    names = ("attention_dropout", "attn_dropout")
    found = [getattr(module, name, 0.0) for module in model.modules() for name in names]
    return any((one.p if isinstance(one, torch.nn.Dropout) else one) for one in found if one is not None)


def reason_against(model: Any) -> str | None:
    """Why this model cannot share prompts, as far as its configuration tells; None: nothing is known against it."""
    config = model.config.get_text_config()
    if getattr(model, "active_peft_config", None) is not None and model.active_peft_config.is_prompt_learning:
        return "prompt-learning adapters put tokens of their own before the prompt"
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"}:
        return f"it has {', '.join(sorted(kinds - {'full_attention'}))} layers"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "it has sliding-window attention"
    if config._attn_implementation not in ("sdpa", ATTENTION):
        return f"it runs with attn_implementation={config._attn_implementation!r}"
    return None


def forward_kwargs(rows: SharedRows) -> dict[str, Any]:
    """What the decoder is called with. The four-dimensional mask is never read; it keeps transformers from building one."""
    unread = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=rows.input_ids.device)
    return {
        "input_ids": rows.input_ids,
        "position_ids": rows.position_ids,
        "attention_mask": unread,
        "covey_rows": rows,
    }
