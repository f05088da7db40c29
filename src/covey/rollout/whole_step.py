"""A whole decode step in one call of decode.cpp, for copies of weights that linear.cpp multiplies with, and for live ones of live.cpp.

A step of ten million parameters computes for half a millisecond; calling its sixty operations from Python took as long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from covey.compiled import live
from covey.rollout.compiled import Slab
from covey.rollout.linear import Live, Paired


class Block(Protocol):
    """The weights of one layer: norms [hidden] and, of the heads, [D] or None, all float32; and products."""

    @property
    def norms(self) -> Sequence[Tensor | None]:
        """Before attention, before the gated layer, of queries, of keys."""
        ...

    @property
    def products(self) -> Sequence[Any]:
        """Queries with keys and values, output, gate, up, down."""
        ...


class _Linear(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("inside", "outside")),
    )

    @classmethod
    def each(cls, linear: Live | Paired) -> list[_Linear]:
        """One, or as many as it is made of."""
        if isinstance(linear, Paired):
            return [cls(linear.weight.data_ptr(), _address(linear.bias), linear.inside, linear.outside)]
        return [cls(part.data_ptr(), _address(bias), part.shape[1], len(part)) for part, bias in linear.parts]


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("before", "after", "query_norm", "key_norm")),
        *((name, _Linear) for name in ("query", "key", "value", "out", "gate", "up", "down")),
    )

    @classmethod
    def of(cls, block: Block) -> _Layer:
        qkv, *others = map(_Linear.each, block.products)
        return cls(*map(_address, block.norms), *qkv, *[_Linear()] * (3 - len(qkv)), *(one for (one,) in others))


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("norm", ctypes.c_void_p),
        ("head", _Linear),
        ("share", ctypes.c_void_p),
        ("turn", ctypes.c_void_p),
    )


class Weights:
    """Where all weights of a decoder are."""

    def __init__(
        self, blocks: Sequence[Block], norm: Tensor, head: Live | Paired, share: int | None, turn: int | None
    ) -> None:
        self.held = blocks, norm, head
        self._layers = (_Layer * len(blocks))(*map(_Layer.of, blocks))
        (last,) = _Linear.each(head)
        self.decoder = _Decoder(ctypes.addressof(self._layers), len(blocks), norm.data_ptr(), last, share, turn)
        layer = self._layers[0]
        heads = layer.query.outside + layer.key.outside + layer.value.outside
        self.vocabulary = int(last.outside)
        self._a_row = 2 * layer.query.inside + heads + layer.out.inside + 2 * layer.gate.outside
        self._widest = max(layer.query.inside, layer.out.inside, layer.down.inside) if turn else 0

    def scratch(self, rows: int) -> int:
        """Numbers that so many rows need on their way."""
        return rows * self._a_row + live.turned_size(rows, self._widest)

    @staticmethod
    def of(blocks: Sequence[Block], norm: Tensor, head: Any) -> Weights | None:
        """None where another library multiplies, or layers differ in their sizes."""
        used = [*(linear for block in blocks for linear in block.products), head]
        if all(isinstance(linear, Paired) for linear in used):
            share, turn = head.kernels.share_address, None
        elif all(isinstance(linear, Live) and linear.is_plain for linear in used) and (found := live.kernels()):
            share, turn = found.share_address, found.turn_address
        else:
            return None
        sizes = {tuple((linear.inside, linear.outside) for linear in block.products) for block in blocks}
        return Weights(blocks, norm, head, share, turn) if len(sizes) == 1 else None


class Slabs:
    """A cache of all layers: `own` and `prompts`, each [2, .., H, columns, D]."""

    def __init__(self, own: Sequence[Tensor], prompts: Sequence[Tensor]) -> None:
        kind = Slab * len(own)
        self.own, self.prompts = kind(*map(Slab.of, own)), kind(*map(Slab.of, prompts))


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
