"""The kernels of decode.cpp, called on torch's memory; `covey.compiled` makes the library."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from covey.compiled import NUMBERS, library

if TYPE_CHECKING:
    from covey.rollout.whole_step import Slabs, Weights

SOURCE = Path(__file__).with_name("decode.cpp")
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
