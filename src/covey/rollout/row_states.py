"""Recurrent states of the rows: what convolutions, state-space and linear-attention layers hand from token to token.

A model leaves such a state in transformers' cache, or on its modules: tensors with one row a sequence, whatever the kind of layer.
A prompt's states are computed once and copied for each completion of its group; rows are copied as they move in the batch.
Keys and values of attention layers pass through that cache unchanged: the engine's attention keeps them.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from covey.kernels import cache_factory, cache_keyword, tensors_on
from covey.models import unwrapped
from covey.rollout.attention import LAYER

Path: TypeAlias = "tuple[str | int, ...]"
"""Attributes and keys that lead from a cache or module to a tensor."""

PROBED_ROWS = 2
"""Rows of the forward pass that shows which tensors have one row a sequence."""


@dataclass(frozen=True, eq=False)
class Place:
    """The place of one state of a model, and the shape of a row of it."""

    module: nn.Module | None
    """The module that holds it; None: transformers' cache does."""
    path: Path
    shape: torch.Size
    dtype: torch.dtype
    initial: int = 0
    """Its values before any token; not 0 for the ids of tokens before, which stand for the end of a text."""

    def read(self, cache: Any) -> Tensor:
        """[R, *shape], the state after a forward pass with this cache."""
        state = _at(cache if self.module is None else self.module, self.path)
        assert isinstance(state, Tensor)
        return state

    def write(self, cache: Any, value: Tensor | None) -> None:
        write_at(cache if self.module is None else self.module, self.path, value)


def _at(holder: Any, path: Path) -> Any:
    value: Any = holder
    for key in path:
        value = value[key] if type(value) in (dict, list) else getattr(value, str(key))
    return value


def write_at(root: Any, path: Path, value: Tensor | None) -> None:
    """Set the tensor to which `path` leads from a cache or module."""
    holder: Any = _at(root, path[:-1])
    if type(holder) in (dict, list):
        holder[path[-1]] = value
    else:
        setattr(holder, str(path[-1]), value)


@dataclass(frozen=True, eq=False)
class StatePlaces:
    """The states of a model: their places, and a cache whose flags say that states are there."""

    places: tuple[Place, ...]
    carrier: Any
    """transformers' cache that decode steps get. The states of the rows are put into it before each."""
    keyword: str
    """The keyword of the model's forward that takes a cache."""
    new_cache: Callable[[], Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the states of one row."""
        return sum(place.shape.numel() * place.dtype.itemsize for place in self.places)

    def clear(self, cache: Any) -> None:
        """Leave no state on the model's modules, as before a first forward pass."""
        for place in self.places:
            if place.module is not None:
                place.write(cache, None)


def find_states(
    model: nn.Module, run: Callable[[Any, Tensor], Any], prepare: Callable[[Any], Any] | None = None
) -> StatePlaces:
    """The states that a forward pass leaves behind. `run(cache, ids)` makes one of `ids` [R, L] with this cache.

    `prepare` changes each new cache; by default its keys and values pass through.
    """
    inner = unwrapped(model)
    keyword = cache_keyword(inner)
    assert keyword is not None
    device = next(inner.parameters()).device
    ids = torch.zeros(PROBED_ROWS, 3, dtype=torch.int64, device=device)
    before = dict(tensors_on(inner))
    empty = cache_factory(inner)
    new_cache = lambda: (prepare or _passing)(empty())
    cache = new_cache()
    run(cache, ids)
    places = [_place(None, path, x) for path, x in tensors_in(cache, ()) if _has_rows(path, x)]
    for (module, name), x in tensors_on(inner):
        old = before.get((module, name))
        if old is not x and _has_rows((name,), x):
            places.append(_place(module, (name,), x))
            setattr(module, name, old)
    if any(not place.dtype.is_floating_point for place in places):
        shorter = new_cache()
        run(shorter, ids[:, :1])
        places = [_with_initial(place, shorter) for place in places]
    return StatePlaces(tuple(places), cache, keyword, new_cache)


def _with_initial(place: Place, cache: Any) -> Place:
    """The place with its value before any token, of which a pass of one token leaves all but the last."""
    if place.dtype.is_floating_point or place.module is not None or place.shape[-1:] < (2,):
        return place
    return replace(place, initial=int(place.read(cache).flatten()[0]))


def _passing(cache: Any) -> Any:
    """The cache, which keeps no keys and values any more: attention gets those of the tokens computed now, with their layer."""

    def update(key: Tensor, value: Tensor, layer_idx: int, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        setattr(key, LAYER, layer_idx)
        return key, value

    cache.update = update
    return cache


def _place(module: nn.Module | None, path: Path, x: Tensor) -> Place:
    return Place(module, path, x.shape[1:], x.dtype)


def _has_rows(path: Path, x: Tensor) -> bool:
    return x.ndim > 0 and x.shape[0] == PROBED_ROWS and path[-1] not in ("keys", "values")


def tensors_in(held: Any, path: Path) -> Iterator[tuple[Path, Tensor]]:
    """Tensors in a cache, its layers, and their lists and mappings."""
    if isinstance(held, Tensor):
        yield path, held
        return
    if isinstance(held, Mapping):
        items: Any = held.items()
    elif isinstance(held, list):
        items = enumerate(held)
    elif not path or (path[0] == "layers" and len(path) == 2):
        items = vars(held).items()
    else:
        return
    for key, value in items:
        yield from tensors_in(value, (*path, key))


NewTensor: TypeAlias = Callable[[Hashable, Tensor, "tuple[int, ...]"], Tensor]
"""(name, rows so far, shape) to a tensor of this shape that begins with these rows, zeros behind."""


class RowStates:
    """States of R running rows, and of prompts whose rows have not begun."""

    def __init__(self, places: StatePlaces, device: torch.device) -> None:
        self.places, self.device = places, device
        self.tensors = [
            torch.zeros(0, *place.shape, dtype=place.dtype, device=device) for place in places.places
        ]  # each [capacity, *shape]
        self._prompts: dict[int, tuple[list[Tensor], int]] = {}
        """By slot: the states after a prefill of several prompts, and this prompt's row of them."""

    @property
    def capacity(self) -> int:
        return len(self.tensors[0]) if self.tensors else 0

    def reserve(self, held: int, rows: int, new_tensor: NewTensor) -> None:
        """Allocate `rows` rows; the first `held` keep their states."""
        if rows > self.capacity:
            shapes = [(rows, *place.shape) for place in self.places.places]
            self.tensors = [new_tensor(("state", i), self.tensors[i][:held], shape) for i, shape in enumerate(shapes)]

    def move(self, to: Sequence[int], source: Sequence[int]) -> None:
        """Rows `source` replace the rows `to`."""
        to_rows, from_rows = self._index(to), self._index(source)
        for x in self.tensors:
            x[to_rows] = x[from_rows]

    def _index(self, rows: Sequence[int]) -> Tensor:
        """[R] on the device, once for all states."""
        return torch.tensor(list(rows), dtype=torch.int64, device=self.device)

    def begin(self, first: int, slots: Sequence[int]) -> None:
        """Rows from `first` on begin where the prompts of `slots` end; with their initial values after no token."""
        for slot, members in groupby(slots):
            rows = slice(first, first + len(list(members)))
            after, place = self._prompts.get(slot, (None, 0))
            for i, x in enumerate(self.tensors):
                x[rows] = self.places.places[i].initial if after is None else after[i][place]
            first = rows.stop
        self._prompts = {}

    @contextmanager
    def prefilling(self, slots: Sequence[int]) -> Iterator[Any]:
        """Context of a prefill of the prompts of `slots`, all of one length: yields the cache for the model's forward."""
        cache = self.places.new_cache()
        self.places.clear(cache)
        try:
            yield cache
            after = [place.read(cache) for place in self.places.places]
        finally:
            self.places.clear(cache)
        self._prompts |= {slot: (after, place) for place, slot in enumerate(slots)}

    def decoding(self, rows: int) -> AbstractContextManager[Any]:
        """Context of a decode step of the first `rows` rows: yields the cache for the model's forward."""
        return self._continuing([x[:rows] for x in self.tensors])

    @contextmanager
    def extending(self, rows: Sequence[int]) -> Iterator[Any]:
        """Context of a prefill of answers, all of one length, into these rows: yields the cache for the model's forward."""
        place = self._index(rows)
        held = [x[place] for x in self.tensors]
        with self._continuing(held) as cache:
            yield cache
        for x, now in zip(self.tensors, held, strict=True):
            x[place] = now

    @contextmanager
    def _continuing(self, held: Sequence[Tensor]) -> Iterator[Any]:
        """Context of a forward pass from the states `held`, which it overwrites: yields the cache."""
        cache = self.places.carrier
        for place, x in zip(self.places.places, held, strict=True):
            place.write(cache, x)
        try:
            yield cache
            for place, x in zip(self.places.places, held, strict=True):
                now = place.read(cache)
                if now is not x:
                    x.copy_(now)
        finally:
            self.places.clear(cache)
