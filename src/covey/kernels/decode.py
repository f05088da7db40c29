"""Decode kernels (`cpp/decode.cpp`): attention over the KV cache, RMSNorm, and a whole decode step in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.kernels.attention_product import Layout
from covey.kernels.compile import NUMBERS, load
from covey.kernels.matmul_fp32 import Fp32Matmul, fp32_matmul, transposed_size
from covey.kernels.packed_attention import Heads, packed_attention_for
from covey.kernels.sampler_linear import InPlaceLinear

SOURCE = Path(__file__).parent / "cpp" / "decode.cpp"
WIDTHS = range(16, 257, 16)
"""Head widths that the kernels can be compiled for."""


class DecodeStep(ctypes.Structure):
    """Arguments of a decode step that all layers share; the same layout as in decode.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "heads", "repeats", "width", "column", "threads")),
        *((name, ctypes.c_void_p) for name in ("starts", "owners", "lengths", "places", "cosines", "sines")),
        *((name, ctypes.c_double) for name in ("scale", "epsilon")),
    )
    held: Tensor
    """Reference that keeps the tensor behind the address `places` alive."""


class CacheTable(ctypes.Structure):
    """Address and strides of one layer's cache; the same layout as in decode.cpp."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("by_kind", ctypes.c_int64),
        ("by_row", ctypes.c_int64),
        ("by_head", ctypes.c_int64),
    )

    @classmethod
    def of(cls, x: Tensor) -> CacheTable:
        """`x` [2, R, H, columns, D], contiguous in its last two."""
        return cls(x.data_ptr(), x.stride(0), x.stride(1), x.stride(2))


class CacheTables:
    """Addresses of the cache of all layers: `suffix` and `prompts`, each [2, .., H, columns, D]."""

    def __init__(self, suffix: Sequence[Tensor], prompts: Sequence[Tensor]) -> None:
        kind = CacheTable * len(suffix)
        self.suffix, self.prompts = kind(*map(CacheTable.of, suffix)), kind(*map(CacheTable.of, prompts))


class _Linear(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("in_features", "out_features")),
    )

    @classmethod
    def each(cls, linear: InPlaceLinear) -> list[_Linear]:
        """One entry per weight matrix."""
        return [cls(part.data_ptr(), _address(bias), part.shape[1], len(part)) for part, bias in linear.parts]


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("before", "after", "query_norm", "key_norm")),
        *((name, _Linear) for name in ("query", "key", "value", "out", "gate", "up", "down")),
    )

    @classmethod
    def of(cls, block: Any) -> _Layer:
        """`block.norms`: weights before attention, before the MLP, of queries, of keys; `block.products`: qkv, output, gate, up, down."""
        return cls(
            *map(_address, block.norms), *(linear for product in block.products for linear in _Linear.each(product))
        )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("norm", ctypes.c_void_p),
        ("head", _Linear),
        ("share", ctypes.c_void_p),
        ("transpose", ctypes.c_void_p),
    )


class DecodeWeights:
    """Addresses of all weights of a decoder, for a decode step in one call."""

    def __init__(self, blocks: Sequence[Any], norm: Tensor, head: InPlaceLinear, matmul: Fp32Matmul) -> None:
        self.held = blocks, norm, head
        self._layers = (_Layer * len(blocks))(*map(_Layer.of, blocks))
        (last,) = _Linear.each(head)
        functions = matmul.function_pointer, matmul.transpose_pointer
        self.decoder = _Decoder(ctypes.addressof(self._layers), len(blocks), norm.data_ptr(), last, *functions)
        layer = self._layers[0]
        heads = layer.query.out_features + layer.key.out_features + layer.value.out_features
        self.vocabulary = int(last.out_features)
        self._a_row = 2 * layer.query.in_features + heads + layer.out.in_features + 2 * layer.gate.out_features
        self._widest = max(layer.query.in_features, layer.out.in_features, layer.down.in_features)

    def scratch(self, rows: int) -> int:
        """Elements of scratch space for `rows` rows."""
        return int(rows * self._a_row) + transposed_size(rows, self._widest)

    @staticmethod
    def of(blocks: Sequence[Any], norm: Tensor, head: Any) -> DecodeWeights | None:
        """Addresses of these layers; None if another library multiplies, or layers differ in size."""
        used = [*(linear for block in blocks for linear in block.products), head]
        matmul = (
            fp32_matmul() if all(isinstance(linear, InPlaceLinear) and linear.is_plain for linear in used) else None
        )
        if matmul is None:
            return None
        sizes = {tuple((linear.in_features, linear.out_features) for linear in block.products) for block in blocks}
        return DecodeWeights(blocks, norm, head, matmul) if len(sizes) == 1 else None


class DecodeKernels:
    """Compiled functions for one dtype and one head width."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._attend, self._add_norm, self._decode = library.covey_attend, library.covey_add_norm, library.covey_decode
        self._attend.argtypes = [pointer] * 9
        self._add_norm.argtypes = [pointer, pointer, pointer, pointer, size, size, ctypes.c_double, size]
        self._decode.argtypes = [pointer] * 7
        self._attend.restype = self._add_norm.restype = self._decode.restype = None

    @staticmethod
    def prefill(query: Tensor, key: Tensor, value: Tensor, layouts: Sequence[Layout], scale: float) -> Tensor | None:
        """Attention [Hq, S, D] of whole prompts from `query` [Hq, S, D], `key`, `value` [Hkv, S, D]; None where PyTorch computes it."""
        kernels = packed_attention_for(query, key, layouts)
        return None if kernels is None else kernels.forward(query, key, value, layouts, scale)[0]

    def attend(
        self,
        step: DecodeStep,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        suffix: Tensor,
        prompts: Tensor,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
    ) -> Tensor:
        """[R, Hq, D] from `query` [R, Hq, D], `key` and `value` [R, Hkv, D], which it also stores in `suffix`.

        `suffix` [2, >= R, Hkv, columns, D] and `prompts` [2, P, Hkv, columns, D] are the cache of one layer. Rows from
        `step.rows` on are zeros. The norms [D] float32 come before the rotation that `step` describes, if it does.
        """
        out = torch.empty(query.shape, dtype=query.dtype)
        out[step.rows :] = 0
        by = ctypes.byref
        self._attend(
            by(step),
            *map(Heads.of, (query, key, value)),
            None if query_norm is None else query_norm.data_ptr(),
            None if key_norm is None else key_norm.data_ptr(),
            by(CacheTable.of(suffix)),
            by(CacheTable.of(prompts)),
            out.data_ptr(),
        )
        return out

    def decode(self, step: DecodeStep, weights: DecodeWeights, tables: CacheTables, x: Tensor) -> Tensor:
        """[R, V] logits of the embedded tokens `x` [R, hidden] float32, which are overwritten: one step through all layers.

        Keys and values are stored in `tables`. `step` describes the rotation.
        """
        out = torch.empty(len(x), weights.vocabulary, dtype=self.dtype)
        scratch = torch.empty(weights.scratch(len(x)), dtype=self.dtype)  # by torch, which raises when memory runs out
        by, places = ctypes.byref, (tensor.data_ptr() for tensor in (x, scratch, out))
        self._decode(by(step), by(weights.decoder), tables.suffix, tables.prompts, *places)
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


def decode_kernels(device: torch.device, dtype: torch.dtype, width: int) -> DecodeKernels | None:
    """The kernels for heads of this width; None where they do not run."""
    if device.type != "cpu" or dtype not in NUMBERS or width not in WIDTHS:
        return None
    library = load(SOURCE, defines(dtype, width), "Decoding")
    return None if library is None else DecodeKernels(library, dtype)


def defines(dtype: torch.dtype, width: int) -> tuple[str, ...]:
    """Macros of decode.cpp for this precision and head width."""
    return f"NUMBER={NUMBERS[dtype]}", f"WIDTH={width}"


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
