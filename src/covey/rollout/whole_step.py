"""A whole decode step in one call of decode.cpp, for copies of weights that linear.cpp multiplies with.

A step of ten million parameters computes for half a millisecond; calling its sixty operations from Python took as long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from covey.rollout.compiled import Slab
from covey.rollout.linear import Paired


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
    def of(cls, linear: Paired) -> _Linear:
        return cls(linear.weight.data_ptr(), _address(linear.bias), linear.inside, linear.outside)


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("before", "after", "query_norm", "key_norm")),
        *((name, _Linear) for name in ("qkv", "out", "gate", "up", "down")),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("norm", ctypes.c_void_p),
        ("head", _Linear),
        ("share", ctypes.c_void_p),
    )


class Weights:
    """Where all weights of a decoder are."""

    def __init__(self, blocks: Sequence[Block], norm: Tensor, head: Paired) -> None:
        self.held = blocks, norm, head
        qkv, out, gate, *_ = blocks[0].products
        self.vocabulary = head.outside
        self.scratch = 2 * qkv.inside + qkv.outside + out.inside + gate.outside
        """Numbers that a row needs on its way."""
        layers = (_Layer(*map(_address, block.norms), *map(_Linear.of, block.products)) for block in blocks)
        self._layers = (_Layer * len(blocks))(*layers)
        share = head.kernels.share_address
        self.decoder = _Decoder(ctypes.addressof(self._layers), len(blocks), norm.data_ptr(), _Linear.of(head), share)

    @staticmethod
    def of(blocks: Sequence[Block], norm: Tensor, head: Any) -> Weights | None:
        """None where another library multiplies, or layers differ in their sizes."""
        used = [linear for block in blocks for linear in block.products]
        if not all(isinstance(linear, Paired) for linear in (*used, head)):
            return None
        sizes = {tuple((linear.inside, linear.outside) for linear in block.products) for block in blocks}
        return Weights(blocks, norm, head) if len(sizes) == 1 else None


class Slabs:
    """A cache of all layers: `own` and `prompts`, each [2, .., H, columns, D]."""

    def __init__(self, own: Sequence[Tensor], prompts: Sequence[Tensor]) -> None:
        kind = Slab * len(own)
        self.own, self.prompts = kind(*map(Slab.of, own)), kind(*map(Slab.of, prompts))


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
