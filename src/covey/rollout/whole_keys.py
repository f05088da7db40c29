"""Forward pass of the engine for models whose own attention reads all keys: it chooses among them, biases them, or has no interface.

Each step gathers the keys of a row's prompt and its own into one run, as transformers' cache would hand them to the model. Prompts are
still computed and stored once. A trial shows in which order the model reads them: padded on the left, as in transformers' `generate`,
or each key at the place of its position, for layers that choose blocks of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from covey.errors import Unsupported
from covey.kernels import (
    cache_factory,
    cache_keyword,
    choices,
    has_states,
    has_windows,
    in_place_steps,
    reason_against_choices,
    sampling,
)
from covey.models import accepts, evaluating, float32_stream, unwrapped
from covey.rollout.autocast import AutocastForward
from covey.rollout.forward import ModulesForward, logit_errors, verify
from covey.rollout.kv_cache import LayerShape
from covey.rollout.row_keys import Order
from covey.rollout.row_states import PROBED_ROWS, find_states, tensors_in, write_at
from covey.rollout.supported import expect_on_one_device

FURTHER = "update_index"
"""Begin of the names of methods with which a cache, or a layer of it, keeps an indexer's keys."""
PROBED_TOKENS = 3
FLOAT_ERROR = 1e-3
"""Largest measure of `verify` in float32, of any position."""
Store = tuple[int, str]
"""A layer, and the method of its cache by which keys are kept."""


@dataclass(eq=False)
class _Sizes:
    """Batch that records the shapes of all that the cache keeps of each token."""

    dtype: torch.dtype
    shapes: dict[Store, LayerShape] = field(default_factory=dict)
    past = 0

    def keep(self, store: Store, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if store in self.shapes:
            raise Unsupported("a layer keeps keys more than once")
        if any(x.dtype != self.dtype for x in new) and not torch.is_autocast_enabled(new[0].device.type):
            raise Unsupported("its keys have another precision than its weights")
        width = max(x.shape[-1] for x in new)
        self.shapes[store] = LayerShape(new[0].shape[1], width, is_index=store[1] != "update")
        return new


class WholeKeysForward(ModulesForward):
    """The model's own forward and attention, over the keys that the engine's cache gathers."""

    order: Order = "end"
    text_only: str | None = "its own attention reads the keys of texts alone"

    def _expect(self, model: nn.Module) -> None:
        inner = unwrapped(model)
        expect_on_one_device(inner)
        if not accepts(inner, "attention_mask") or cache_keyword(inner) is None:
            raise Unsupported(f"{type(inner).__name__} takes no mask or no cache")

    def _layers(self) -> tuple[LayerShape, ...]:
        """Shapes of all that the model keeps of each token, from a recording forward pass, and its states."""
        self.is_indexed, self.places = True, dict[Store, int]()
        self.batch: Any = None

        def run(cache: Any, ids: Tensor) -> None:
            self.batch = _Sizes(self.dtype)
            at = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
            self._call(ids, at, self.batch, use_cache=True, **{self.keyword: cache})

        with evaluating(self.model):
            if has_states(self.model):
                self.states = find_states(self.model, run, self._gathering)
                self.cache = self.states.carrier
            else:
                self.cache = self._gathering(cache_factory(self.model)())
                ids = torch.zeros(PROBED_ROWS, PROBED_TOKENS, dtype=torch.int64, device=self.device)
                run(self.cache, ids)
        recorded: Any = self.batch
        shapes: dict[Store, LayerShape] = recorded.shapes
        if not any(method == "update" for _, method in shapes):
            raise Unsupported(f"{type(self.model).__name__} hands no keys to transformers' cache")
        self._find_positions()
        self.places = {store: i for i, store in enumerate(shapes)}
        return tuple(shapes.values())

    def _find_positions(self) -> None:
        """Note where the cache keeps the positions of its keys. Raises Unsupported for tensors of which nothing is known."""
        states = () if self.states is None else self.states.places
        of_states = [place.path for place in states if place.module is None]
        others = [(path, x) for path, x in tensors_in(self.cache, ()) if x.ndim and path not in of_states]
        seen = (PROBED_ROWS, PROBED_TOKENS)
        for path, x in others:
            if x.is_floating_point() or x.shape[-2:] != seen or not bool((x == torch.arange(seen[1]).to(x)).all()):
                raise Unsupported(f"{type(self.model).__name__} keeps {path[-1]} in its cache")
        self.positions = [(path, x.shape[:-2]) for path, x in others]

    def _gathering(self, cache: Any) -> Any:
        """The cache, whose keys and values are kept by the batch of the pass."""

        def update(key: Tensor, value: Tensor, layer_idx: int, *args: Any, **options: Any) -> tuple[Tensor, ...]:
            return self._keep((layer_idx, "update"), key, value)

        cache.update = update
        cache.get_seq_length = lambda layer_idx=0: self.batch.past
        cache.get_query_offset = cache.get_seq_length
        cache.get_mask_sizes = lambda query_length, layer_idx=0: (self.batch.past + query_length, 0)
        for name in [name for name in dir(cache) if name.startswith(FURTHER)]:
            setattr(cache, name, lambda keys, layer_idx, name=name: self._keep_further((layer_idx, name), keys))
        for i, layer in enumerate(cache.layers):
            for name in [name for name in dir(layer) if name.startswith(FURTHER)]:
                setattr(layer, name, partial(self._keep_further, (i, name)))
        return cache

    def _keep(self, store: Store, *new: Tensor) -> tuple[Tensor, ...]:
        if isinstance(self.batch, _Sizes):
            return self.batch.keep(store, new)
        whole: tuple[Tensor, ...] = self.batch.whole_keys(self.places[store], new, self.order)
        return whole

    def _keep_further(self, store: Store, keys: Tensor) -> Tensor:
        """All keys of an indexer, after these [B, L, D] or [B, H, L, D]."""
        if keys.ndim == 3:
            return self._keep(store, keys[:, None])[0][:, 0]
        return self._keep(store, keys)[0]

    @contextmanager
    def _caching(self, length: int, batch: Any) -> Iterator[dict[str, Any]]:
        self.batch = batch
        inputs = {"use_cache": True, "attention_mask": batch.whole_mask(length, self.order)}
        if self.states is None:
            yield {**inputs, self.keyword: self._after(self.cache)}
            return
        with batch.states() as cache, in_place_steps(self.steps):
            yield {**inputs, self.keyword: self._after(cache)}

    def _after(self, cache: Any) -> Any:
        """The cache, with the positions of the keys that the batch has."""
        for path, lead in self.positions:
            write_at(cache, path, self.batch.past_positions(lead))
        return cache

    def _call(self, ids: Tensor, positions: Tensor, batch: Any, **inputs: Any) -> Any:
        if self.takes_positions:
            inputs["position_ids"] = positions
        with sampling(), float32_stream(self.model), self._watching():
            return self.model(input_ids=ids, **inputs, **self.extra)


class WholeKeysAutocast(AutocastForward, WholeKeysForward):
    """`WholeKeysForward` in another precision than the weights'."""


def whole_keys_forward(model: nn.Module, dtype: torch.dtype | None, float32_head: bool) -> WholeKeysForward:
    """The forward pass over whole keys, in the order that gives the model's own logits. Raises Unsupported if none does.

    `dtype` is that of a computation under autocast; None: the weights' own.
    """
    inner = unwrapped(model)
    if reason := reason_against_choices(inner):
        raise Unsupported(reason)
    made = WholeKeysForward(model, float32_head) if dtype is None else WholeKeysAutocast(model, dtype, float32_head)
    orders: tuple[Order, ...] = ("end",)
    if choices(inner) and not has_windows(inner):  # which count from the end
        orders = ("end", "position")
    errors = dict[Order, Tensor]()
    for made.order in orders:
        errors[made.order] = logit_errors(made, model)
    made.order = min(orders, key=lambda order: float(errors[order].mean()))
    is_sharp = made.dtype == torch.float32 and made.states is None  # a state would remember the padding of the trial
    if is_sharp and not float(errors[made.order].max()) <= FLOAT_ERROR:
        raise Unsupported(f"the engine's logits differ from {type(inner).__name__}'s own")
    verify(made, model)
    return made
