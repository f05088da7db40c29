"""The kernels of decode.cpp, called on torch's memory; `covey.kernels.compile` makes the library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from covey.kernels import matmul_fp32 as live
from covey.kernels.compile import NUMBERS, library
from covey.kernels.sampler_linear import Live, Paired

SOURCE = Path(__file__).parent / "cpp" / "decode.cpp"
WIDTHS = range(16, 257, 16)
"""Widths of heads that the kernels can be compiled for."""


class Step(ctypes.Structure):
    """What all layers of a decode step share; the same layout as in decode.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "heads", "repeats", "width", "column", "threads")),
        *((name, ctypes.c_void_p) for name in ("starts", "owners", "lengths", "places", "cosines", "sines")),
        *((name, ctypes.c_double) for name in ("scale", "epsilon")),
    )
    held: Tensor
    """What one of the pointers points to, if nobody else keeps it."""


class _Heads(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("by_row", ctypes.c_int64), ("by_head", ctypes.c_int64))

    @classmethod
    def of(cls, x: Tensor) -> _Heads:
        """`x` [R, H, D], contiguous in D."""
        return cls(x.data_ptr(), x.stride(0), x.stride(1))


class Slab(ctypes.Structure):
    """One layer's cache; the same layout as in decode.cpp."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("by_kind", ctypes.c_int64),
        ("by_row", ctypes.c_int64),
        ("by_head", ctypes.c_int64),
    )

    @classmethod
    def of(cls, x: Tensor) -> Slab:
        """`x` [2, R, H, columns, D], contiguous in its last two."""
        return cls(x.data_ptr(), x.stride(0), x.stride(1), x.stride(2))


class Slabs:
    """A cache of all layers: `own` and `prompts`, each [2, .., H, columns, D]."""

    def __init__(self, own: Sequence[Tensor], prompts: Sequence[Tensor]) -> None:
        kind = Slab * len(own)
        self.own, self.prompts = kind(*map(Slab.of, own)), kind(*map(Slab.of, prompts))


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


class Kernels:
    """The compiled functions for one precision and one width of heads."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._attend, self._add_norm, self._decode = library.covey_attend, library.covey_add_norm, library.covey_decode
        self._attend.argtypes = [pointer] * 9
        self._add_norm.argtypes = [pointer, pointer, pointer, pointer, size, size, ctypes.c_double, size]
        self._decode.argtypes = [pointer] * 7
        self._attend.restype = self._add_norm.restype = self._decode.restype = None

    def attend(
        self,
        step: Step,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own: Tensor,
        prompts: Tensor,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
    ) -> Tensor:
        """[R, Hq, D] from `query` [R, Hq, D], `key` and `value` [R, Hkv, D], which it also puts into `own`.

        `own` [2, >= R, Hkv, columns, D] and `prompts` [2, P, Hkv, columns, D] are the cache of one layer. Rows from
        `step.rows` on are zeros. The norms [D] float32 come before the rotation that `step` describes, if it does.
        """
        out = torch.empty(query.shape, dtype=query.dtype)
        out[step.rows :] = 0
        by = ctypes.byref
        self._attend(
            by(step),
            by(_Heads.of(query)),
            by(_Heads.of(key)),
            by(_Heads.of(value)),
            None if query_norm is None else query_norm.data_ptr(),
            None if key_norm is None else key_norm.data_ptr(),
            by(Slab.of(own)),
            by(Slab.of(prompts)),
            out.data_ptr(),
        )
        return out

    def decode(self, step: Step, weights: Weights, slabs: Slabs, x: Tensor) -> Tensor:
        """[R, V] logits of the embedded tokens `x` [R, hidden] float32, which are overwritten: one step through all layers.

        Keys and values go into `slabs`. Rotations are those that `step` describes.
        """
        out = torch.empty(len(x), weights.vocabulary, dtype=self.dtype)
        scratch = torch.empty(weights.scratch(len(x)), dtype=self.dtype)  # torch's, which says when there is no memory
        by, places = ctypes.byref, (tensor.data_ptr() for tensor in (x, scratch, out))
        self._decode(by(step), by(weights.decoder), slabs.own, slabs.prompts, *places)
        return out

    def add_norm(self, x: Tensor, update: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        """[M, K] root-mean-square norm of `x` [M, K] float32 times `weight` [K] float32, after `x += update` in place."""
        out = torch.empty(x.shape, dtype=self.dtype)
        self._add_norm(
            x.data_ptr(),
            None if update is None else update.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            len(x),
            x.shape[1],
            epsilon,
            torch.get_num_threads(),
        )
        return out


def kernels_for(device: torch.device, dtype: torch.dtype, width: int) -> Kernels | None:
    """The kernels for heads of this width; None where they do not run."""
    if device.type != "cpu" or dtype not in NUMBERS or width not in WIDTHS:
        return None
    found = library(SOURCE, defines(dtype, width), "Decoding")
    return None if found is None else Kernels(found, dtype)


def defines(dtype: torch.dtype, width: int) -> tuple[str, ...]:
    """What decode.cpp is compiled for."""
    return f"NUMBER={NUMBERS[dtype]}", f"WIDTH={width}"


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
