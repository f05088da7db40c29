"""What linear layers gave while a model was sampled from, kept for the forward pass of the update that follows.

On-policy, the update begins with a forward pass over tokens that went through the same weights a moment before, one step of
decoding after the other. A sampler that decodes whole steps by kernels writes the outputs of its products here instead of to
scratch, and the learner takes them from here instead of multiplying again. Everything else of the forward pass is computed as ever,
and so is all of the backward pass. Tokens that were never decoded (prompts) are multiplied as ever.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from covey.memory import is_out_of_memory, mapped_zeros

WRITTEN_OUT = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Decoders of one shape, norm, rotary attention, norm, gated SiLU, that the sampler computes without calling their modules."""
CHECKED = 8
"""Rows of each product that are multiplied again all the same, in the first forward pass after a rollout, to be compared."""
SLACK = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""By how much these may differ, the middle one of the rows' distances over their norms: kernels sum in another order (1e-6), and
bfloat16 rounds what they read (5e-3). Other weights give about 1."""
LEAST = 1 / 4
"""Share of a forward pass's rows from which fetching them pays."""


@dataclass(frozen=True, eq=False)
class Product:
    """A weight, or several that are multiplied at once, whose outputs stand side by side."""

    weights: tuple[Tensor, ...]
    """Each [N, K]."""

    @property
    def outside(self) -> int:
        return sum(len(weight) for weight in self.weights)


_generations = itertools.count()


class Outputs:
    """The place for them, at most `most_bytes`. Rows are tokens, in the order in which they were decoded."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.products: tuple[Product, ...] = ()
        self._parameters: tuple[Tensor, ...] = ()
        self.dtype = torch.float32
        self.is_open = False
        self.is_checked = False
        self.generation = next(_generations)
        """Another number whenever the slabs become others, here or in any other place."""
        self.slabs: tuple[Tensor, ...] = ()
        """One a product, [capacity, outputs]."""
        self._capacity = self._used = 0
        self._columns: dict[int, Tensor] = {}
        """By weight: its outputs [capacity, N]."""
        self._versions: tuple[int, ...] = ()
        self._tokens: dict[int, tuple[Tensor, tuple[int, ...], Tensor]] = {}
        """By completion: its tokens, its prompt's, and the row of each token [T_i - 1], -1 where it was not kept."""

    # -- while sampling -----------------------------------------------------------------------------------------------

    def begin(self, products: Sequence[Product], dtype: torch.dtype, parameters: Iterable[Tensor] = ()) -> None:
        """Forget everything: these are the products and all the model's parameters from now on. Without products nothing is kept."""
        self._parameters = tuple(parameters)
        sizes = lambda every: [product.outside for product in every]
        if sizes(products) != sizes(self.products) or dtype != self.dtype:
            self._replace((), 0)
        self.products, self.dtype = tuple(products) if self.most_bytes else (), dtype
        self.forget()
        self._versions = self._now()  # before anybody else can write to them

    def close(self) -> bool:
        """Give the memory back, and keep nothing from now on. Whether there was any."""
        had = bool(self.slabs)
        self.most_bytes, self.products = 0, ()
        self.forget()
        self._replace((), 0)
        return had

    def _replace(self, slabs: tuple[Tensor, ...], capacity: int) -> None:
        self.slabs, self._capacity, self._columns = slabs, capacity, {}
        self.generation = next(_generations)

    def forget(self) -> None:
        """The weights are other ones. Pages that were written once stay, for the next rollout."""
        self._used, self.is_checked = 0, False
        self._columns, self._tokens = {}, {}

    @contextmanager
    def filling(self) -> Iterator[None]:
        """What is sampled inside will be trained on."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False

    @property
    def is_filling(self) -> bool:
        """Whether anything is to be kept now."""
        return self.is_open and bool(self.products)

    def reserve(self, rows: int) -> None:
        """Room for as many tokens as are about to be decoded, or for as many of them as `most_bytes` hold."""
        a_row = sum(product.outside for product in self.products) * self.dtype.itemsize
        capacity = min(self._used + rows, self.most_bytes // a_row)
        if capacity > self._capacity and not self._used:
            self._replace((), 0)
            try:
                self._replace(
                    tuple(mapped_zeros((capacity, one.outside), self.dtype) for one in self.products), capacity
                )
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self.close()
        if not self._columns and self.slabs:
            for product, slab in zip(self.products, self.slabs, strict=True):
                parts = slab.split([len(weight) for weight in product.weights], 1)
                self._columns |= {id(weight): part for weight, part in zip(product.weights, parts, strict=True)}

    def _now(self) -> tuple[int, ...]:
        """Torch counts how often each was written to."""
        return tuple(parameter._version for parameter in self._parameters)

    def take(self, rows: int) -> int | None:
        """Where the next decode step of so many rows writes; None: nowhere."""
        if self._used + rows > self._capacity:
            return None
        first, self._used = self._used, self._used + rows
        return first

    def note(self, token_ids: Tensor, prompt_ids: tuple[int, ...], rows: Tensor) -> None:
        """A finished completion `token_ids` [T], and where the outputs of each but its last [T - 1] are; -1: nowhere."""
        self._tokens[id(token_ids)] = token_ids, prompt_ids, rows

    # -- while learning -----------------------------------------------------------------------------------------------

    def of(self, weight: Tensor) -> Tensor | None:
        """[capacity, N] outputs of this weight."""
        return self._columns.get(id(weight))

    def rows_of(self, token_ids: Tensor, prompt_ids: tuple[int, ...]) -> Tensor | None:
        """[T - 1] int64, where the outputs of these very tokens are."""
        found = self._tokens.get(id(token_ids))
        return None if found is None or found[1] != prompt_ids else found[2]

    def replay(
        self,
        completions: Sequence[tuple[Tensor, tuple[int, ...]] | None],
        lengths: Sequence[int],
        source: Tensor,
        size: int,
    ) -> Replay | None:
        """A forward pass over `size` places of completions of these lengths, each its tokens and its prompt's, or None: to be computed.

        `source` [M] holds the place that predicts each of their tokens. None where too little is known of them.
        """
        if not self._tokens or self._versions != self._now():
            return None
        nowhere = torch.full((1,), -1)
        parts = []
        for known, length in zip(completions, lengths, strict=True):
            rows = None if known is None else self.rows_of(*known)
            rows = torch.full((max(0, length - 1),), -1) if rows is None else rows
            parts += [nowhere[:length], rows]  # a completion's first token is predicted by its prompt
        index = torch.full((size,), -1)
        index[source] = torch.cat(parts)
        return Replay(self, index) if int((index >= 0).sum()) >= LEAST * size else None


@dataclass(eq=False)
class Replay:
    """One forward pass, some of whose tokens are known."""

    outputs: Outputs
    index: Tensor
    """[S], the row of each token among the outputs, -1 where it is not known."""
    missing: Tensor = field(init=False)
    checked: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.missing = (self.index < 0).nonzero().flatten()
        known = (self.index >= 0).nonzero().flatten()
        some = 0 if self.outputs.is_checked else min(CHECKED, len(known))
        self.checked = known[torch.linspace(0, len(known) - 1, some).long()]
        self.places = self.index.clamp(min=0)

    def knows(self, weight: Tensor, dtype: torch.dtype, rows: int) -> bool:
        """Whether the product of so many rows with this weight is that of this forward pass."""
        found = self.outputs.of(weight)
        return found is not None and found.dtype == dtype and rows == len(self.index)

    def product(self, weight: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """[S, N] of a weight that it `knows`, of which `compute` gives those rows whose numbers it is told."""
        known = self.outputs.of(weight)
        assert known is not None
        out = known[self.places] if known.stride(0) != known.shape[1] else known.index_select(0, self.places)
        fresh, again = compute(torch.cat((self.missing, self.checked))).split([len(self.missing), len(self.checked)])
        self._compare(out[self.checked].float(), again.float(), SLACK[out.dtype])
        # what was compared is not put in: the next product would read something else than the sampler's did
        return out.index_copy_(0, self.missing, fresh)

    def _compare(self, kept: Tensor, fresh: Tensor, slack: float) -> None:
        gaps = (kept - fresh).norm(dim=1) / fresh.norm(dim=1).clamp(min=1e-30)
        gap = float(gaps.median()) if len(gaps) else 0.0
        if gap > slack and math.isfinite(float(fresh.sum())):  # others look for numbers that are none
            raise Disagreement(gap)


class Disagreement(Exception):  # noqa: N818 - nobody's error: the forward pass begins again
    """The sampler's products are not those that the learner computes: their relative distance."""


_here = threading.local()


@contextmanager
def replaying(replay: Replay | None) -> Iterator[None]:
    """Linear layers that this thread calls inside take what `replay` knows of them."""
    before = current()
    _here.replay = replay
    try:
        yield
        if replay is not None:
            replay.outputs.is_checked = True
    finally:
        _here.replay = before


def current() -> Replay | None:
    """What is replayed in this thread."""
    found: Any = getattr(_here, "replay", None)
    return found if found is None or isinstance(found, Replay) else None
