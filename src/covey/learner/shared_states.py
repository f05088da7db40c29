"""Layers with a state in packed rows: the state at a prompt's end starts every completion of its group, forward and backward.

Each such layer unpacks its input: the prompts, those of one length together and without padding, and then all completions at once,
padded behind their ends, from the states of their prompts. A layer that cannot begin with a state reads each completion with its prompt
before it; attention, experts and everything else of a prompt are still computed once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from covey.errors import RAW_ERRORS
from covey.kernels import Layout
from covey.process.device import onto

Way = Literal["states", "rows"]
"""Completions from their prompts' states, or each with its prompt before it."""

FLOAT_ERROR, ROUNDED_ERROR = 1e-4, 3e-2
"""Tolerance of the ways' relative difference in float32, and in 16 bits."""


class StateCache:
    """The states of one layer, with the methods of transformers' cache. Nothing is written in place, so gradients flow through it."""

    def __init__(self, conv: Mapping[int, Tensor] = {}, recurrent: Mapping[int, Tensor] = {}) -> None:
        self.conv, self.recurrent = dict(conv), dict(recurrent)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent.get(state_idx)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **options: Any,
    ) -> Tensor:
        """[R, D, before + L], the inputs of the convolution, of which the last ones are kept."""
        before = self.conv.get(state_idx)
        whole = conv_states if before is None else torch.cat((before, conv_states), -1)
        width = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        missing = max(0, width - whole.shape[-1])
        self.conv[state_idx] = nn.functional.pad(whole, (missing, 0))[..., -width:]
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> Tensor:
        self.recurrent[state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.conv or self.recurrent)

    def is_recording_past(self, layer_idx: int) -> bool:
        """True, so that no layer changes a state in place."""
        return True

    def forked(self, index: Tensor) -> StateCache:
        """The states of the rows `index`."""
        pick = lambda states: {i: x.index_select(0, index) for i, x in states.items()}
        return StateCache(pick(self.conv), pick(self.recurrent))


def joined(caches: Sequence[StateCache]) -> StateCache:
    """The states of all rows, one cache after the other."""
    join = lambda kind: {i: torch.cat([getattr(cache, kind)[i] for cache in caches]) for i in getattr(caches[0], kind)}
    return StateCache(join("conv"), join("recurrent"))


@dataclass(frozen=True, eq=False)
class Unpacked:
    """Places of a packed row's S tokens in batches of prompts and completions."""

    layouts: tuple[Layout, ...]
    device: torch.device

    @functools.cached_property
    def _starts(self) -> dict[int, list[int]]:
        """First places of the prompts of each length."""
        starts: dict[int, list[int]] = {}
        for layout in self.layouts:
            starts.setdefault(layout.length, []).append(layout.start)
        return starts

    @functools.cached_property
    def prompts(self) -> list[Tensor]:
        """[P_l, l] places of the prompts of each length l."""
        return [
            onto(self.device, torch.tensor(firsts))[:, None] + torch.arange(length, device=self.device)
            for length, firsts in self._starts.items()
        ]

    @functools.cached_property
    def owners(self) -> Tensor:
        """[N] the prompt of each completion that has tokens, among those of `prompts` in order."""
        slot = {start: i for i, start in enumerate(start for firsts in self._starts.values() for start in firsts)}
        slots = [slot[layout.start] for layout in self.layouts for count in layout.counts if count]
        return onto(self.device, torch.tensor(slots, dtype=torch.long))

    @functools.cached_property
    def runs(self) -> list[tuple[int, int, Layout]]:
        """(first place, tokens, layout) of each completion that has tokens."""
        runs = []
        for layout in self.layouts:
            first = layout.answers.start
            for count in layout.counts:
                runs += [(first, count, layout)] if count else []
                first += count
        return runs

    @functools.cached_property
    def completions(self) -> Tensor:
        """[N, T] places of the completions, at least two tokens wide; the last one again behind an end."""
        return self._padded([range(first, first + count) for first, count, _ in self.runs], 2)

    @functools.cached_property
    def rows(self) -> Tensor:
        """[N, T] places of each completion with its prompt before it; a prompt without completions stands alone."""
        prompt = lambda layout: range(layout.start, layout.start + layout.length)
        whole = [[*prompt(layout), *range(first, first + count)] for first, count, layout in self.runs]
        alone = [list(prompt(layout)) for layout in self.layouts if not any(layout.counts)]
        return self._padded([*whole, *alone], 1)

    def _padded(self, places: Sequence[Sequence[int]], least: int) -> Tensor:
        width = max(least, *map(len, places)) if places else least
        padded = [[*row, *[row[-1]] * (width - len(row))] for row in places]
        return onto(self.device, torch.tensor(padded, dtype=torch.long).view(len(places), width))

    def batches(self, way: Way) -> list[Tensor]:
        """[B, L] places of the tokens of each forward pass of a layer."""
        if way == "rows":
            return [self.rows]
        return [*self.prompts, self.completions] if len(self.completions) else self.prompts

    def packed(self, way: Way, values: Sequence[Tensor], size: int) -> Tensor:
        """[1, S, D] from values [B, L, D] of the batches' tokens; the first value of a token that stands in several rows."""
        if way not in self._orders:
            flat = torch.cat([x.flatten() for x in self.batches(way)])
            numbers = torch.arange(len(flat), device=self.device)
            self._orders[way] = numbers.new_zeros(size).scatter_reduce(0, flat, numbers, "amin", include_self=False)
        return torch.cat([x.flatten(0, 1) for x in values]).index_select(0, self._orders[way])[None]

    @functools.cached_property
    def _orders(self) -> dict[Way, Tensor]:
        return {}


@dataclass(eq=False)
class StateLayer:
    """The forward of a layer with a state, for packed rows; for others the layer's own."""

    module: nn.Module
    decoder: nn.Module
    block: nn.Module
    """The module around it, which gets the keywords of the decoder's forward in most models. Recomputation begins there."""
    keyword: str | None
    """The keyword of its cache; None if its state lies on the module."""
    way: Way = "states"
    is_tried: bool = False
    unpacked: Unpacked | None = field(default=None, init=False)
    """The packed rows of the forward pass now; None: it is another one."""
    gets_keywords: bool = field(default=False, init=False)
    """True if the block gets the decoder's keywords."""
    before: Any = field(default=None, init=False)
    forward: Callable[..., Any] = field(init=False)
    signature: inspect.Signature = field(init=False)
    hooks: list[Any] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.signature = inspect.signature(self.module.forward)

    def switch(self) -> None:
        """Take the forward passes of the layer from now on."""
        if not self.hooks:
            self.before, self.forward = self.module.__dict__.get("forward"), self.module.forward
            self.module.forward = self
            around = (self.decoder, self.block)
            self.hooks = [module.register_forward_pre_hook(self._look, with_kwargs=True) for module in around]

    def release(self) -> None:
        if self.hooks:
            for hook in self.hooks:
                hook.remove()
            self.hooks, self.unpacked = [], None
            del self.module.forward
            if self.before is not None:
                self.module.forward = self.before

    def _look(self, module: nn.Module, args: Any, options: dict[str, Any]) -> None:
        rows = options.get("covey_rows")
        self.gets_keywords |= module is self.block and rows is not None
        if module is self.decoder or self.gets_keywords:
            self.unpacked = None if rows is None else rows.unpacked

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The layer's result for packed inputs [1, S, ...]."""
        if self.unpacked is None:
            return self.forward(*args, **options)
        options, size = self._inputs(args, options)

        def call(places: Tensor, cache: StateCache | None = None) -> Any:
            held = {} if self.keyword is None else {self.keyword: cache}
            return self.forward(**{name: _picked(value, places, size) for name, value in options.items()} | held)

        if not self.is_tried:
            self._try(call, size)
        return self._by_states(call, size) if self.way == "states" else self._by_rows(call, size)

    def _inputs(self, args: Any, options: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """The keywords of a call of the layer, without mask and packed rows, and the number S of packed tokens."""
        bound = self.signature.bind(*args, **options).arguments
        rest = next((name for name, x in self.signature.parameters.items() if x.kind is x.VAR_KEYWORD), "")
        options = {**bound, **bound.get(rest, {}), "attention_mask": None}
        names = {"attention_mask", "covey_rows", rest} - self.signature.parameters.keys()
        options = {name: value for name, value in options.items() if name not in names and name != rest}
        return options, next(x.shape[1] for x in _tensors(options) if x.ndim == 3 and x.shape[0] == 1)

    def _by_states(self, call: Callable[..., Any], size: int, shift: float = 0.0) -> Any:
        """Results of the prompts, and of the completions from their states; `shift` is added to recurrent states."""
        unpacked = self.unpacked
        assert unpacked is not None
        caches = [StateCache() for _ in unpacked.prompts]
        results = [call(*pair) for pair in zip(unpacked.prompts, caches, strict=True)]
        if len(unpacked.completions):
            states = joined(caches).forked(unpacked.owners)
            if shift:
                states.recurrent = {i: x + shift for i, x in states.recurrent.items()}
            results.append(call(unpacked.completions, states))
        return self._packed("states", results, size)

    def _by_rows(self, call: Callable[..., Any], size: int) -> Any:
        assert self.unpacked is not None
        return self._packed("rows", [call(self.unpacked.rows)], size)

    def _packed(self, way: Way, results: list[Any], size: int) -> Any:
        assert self.unpacked is not None
        first = [result[0] if isinstance(result, tuple) else result for result in results]
        out = self.unpacked.packed(way, first, size)
        return (out, *results[-1][1:]) if isinstance(results[-1], tuple) else out

    @torch.no_grad()
    def _try(self, call: Callable[..., Any], size: int) -> None:
        """Begin completions with states if the layer reads them and the results are those of whole rows."""
        self.is_tried, self.way = True, "rows"
        if self.keyword is None:
            return
        tensor_of = lambda result: result[0] if isinstance(result, tuple) else result
        try:
            mine, moved = (tensor_of(self._by_states(call, size, shift)) for shift in (0.0, 1.0))
        except RAW_ERRORS:
            return  # a cache of another kind, or a layer that takes no state
        whole = tensor_of(self._by_rows(call, size))
        is_exact = whole.dtype == torch.float32 and not torch.is_autocast_enabled(whole.device.type)
        gap = float((mine - whole).float().norm() / whole.float().norm().clamp(min=1e-12))
        has_recurrent = bool(self.recurrent_of(call))
        if gap <= (FLOAT_ERROR if is_exact else ROUNDED_ERROR) and not (has_recurrent and torch.equal(mine, moved)):
            self.way = "states"

    def recurrent_of(self, call: Callable[..., Any]) -> dict[int, Tensor]:
        """The recurrent states after the first prompts."""
        assert self.unpacked is not None
        call(self.unpacked.prompts[0], cache := StateCache())
        return cache.recurrent


class IndexLayer(StateLayer):
    """The forward of an indexer for packed rows: it reads each completion with its prompt before it, and its choices are places there."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """[1, S, k] choices of the tokens of packed inputs [1, S, ...]. Rows are read one by one: their scores take a square of memory."""
        if self.unpacked is None:
            return self.forward(*args, **options)
        inputs = self.signature.bind(*args, **options).arguments
        size = next(x.shape[1] for x in _tensors(inputs) if x.ndim == 3 and x.shape[0] == 1)
        length, device = self.unpacked.rows.shape[1], self.unpacked.device
        inputs["attention_mask"] = torch.ones(1, length, length, dtype=torch.bool, device=device).tril_()
        rows = [
            self.forward(**{name: _picked(x, row, size) for name, x in inputs.items()})
            for row in self.unpacked.rows.split(1)
        ]
        return self.unpacked.packed("rows", [torch.cat(rows)], size)


@dataclass(eq=False)
class AttentionLayer(StateLayer):
    """The forward of an attention layer that chooses its keys, or has no interface, for packed rows: it reads whole rows by itself."""

    attending: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Context in which the model attends as it was loaded."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The layer's result for packed inputs [1, S, D]."""
        if self.unpacked is None:
            return self.forward(*args, **options)
        inputs, size = self._inputs(args, options)
        places = self.unpacked.rows
        count, length = places.shape
        with self.attending() as name:
            seen = torch.ones(count, 1, length, length, dtype=torch.bool, device=places.device).tril_()
            held = {name: _picked(value, places, size) for name, value in inputs.items()}
            hidden = next(x for x in _tensors(held) if x.is_floating_point())
            if name == "eager":  # which adds its mask
                seen = torch.zeros_like(seen, dtype=hidden.dtype).masked_fill_(~seen, torch.finfo(hidden.dtype).min)
            return self._packed("rows", [self.forward(**{**held, "attention_mask": seen})], size)


def _tensors(held: Any) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, (tuple, list)):
        for value in held:
            yield from _tensors(value)
    elif isinstance(held, dict):
        yield from _tensors(list(held.values()))


def _picked(value: Any, places: Tensor, size: int) -> Any:
    """`value` with each tensor [1, S, ...] in it at `places` [B, L]: [B, L, ...]."""
    if isinstance(value, Tensor):
        is_packed = value.ndim >= 2 and value.shape[:2] == (1, size)
        return value[0].index_select(0, places.flatten()).unflatten(0, places.shape) if is_packed else value
    if isinstance(value, (tuple, list)):
        return type(value)(_picked(x, places, size) for x in value)
    if isinstance(value, dict):
        return {name: _picked(x, places, size) for name, x in value.items()}
    return value
