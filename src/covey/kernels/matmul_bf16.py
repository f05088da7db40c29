"""bfloat16 matmul with AVX-512 BF16 (`cpp/matmul_bf16.cpp`): forward, input gradient and weight gradient."""

from __future__ import annotations

import ctypes
import functools
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from covey.kernels.compile import largest_gap, load_verified, processor_has

SOURCE = Path(__file__).parent / "cpp" / "matmul_bf16.cpp"
PANEL = 16
"""Outputs per register panel."""
BLOCK = 32
"""Rows, or columns, per transposed block."""
SLICE = 2048
"""Rows of a weight gradient summed at a time: a column of their panels fits in the cache."""
CROWDED = 512
"""Row strides that are a multiple of this cause cache-set conflicts."""


class Epilogue(IntEnum):
    """Operation on a matmul's result before it is written; the same numbers as in vectors.h."""

    NONE, SILU, MUL, FP32_OUT, FP32_ACCUMULATE = range(5)


class Bf16Matmul:
    """Functions of `cpp/matmul_bf16.cpp`. All tensors are contiguous; a weight in VNNI pairs is [N / 16, K / 2, 16, 2] bfloat16."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._multiply, self._transpose = library.covey_matmul_bf16, library.covey_transpose_bf16
        self._pair_rows, self._pair_columns = library.covey_pair_rows, library.covey_pair_columns
        self._multiply.argtypes = [pointer, *[size] * 3, *[pointer] * 4, size, size]
        self._transpose.argtypes = [pointer, *[size] * 3, pointer, size]
        self._pair_rows.argtypes = [pointer, *[size] * 4, pointer, size]
        self._pair_columns.argtypes = [pointer, *[size] * 3, pointer, size]
        for function in (self._multiply, self._transpose, self._pair_rows, self._pair_columns):
            function.restype = None
        self.function_pointer = ctypes.cast(library.covey_matmul_bf16_share, pointer).value
        """Address of the function that one thread of a parallel region calls, for the decode kernels."""

    def multiply(
        self,
        out: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        factor: Tensor | None = None,
        epilogue: Epilogue = Epilogue.NONE,
    ) -> Tensor:
        """`x @ weight.T + bias` into `out` [.., N], from `x` [.., K] bfloat16, a paired weight and `bias` [N] float32.

        `epilogue`: SiLU, or product with `factor` [.., N], in bfloat16; FP32_OUT writes float32, FP32_ACCUMULATE adds to `out`.
        """
        in_features, out_features = 2 * weight.shape[1], PANEL * weight.shape[0]
        self._multiply(
            x.data_ptr(), x.numel() // in_features, in_features, out_features, weight.data_ptr(),
            None if bias is None else bias.data_ptr(), None if factor is None else factor.data_ptr(),
            out.data_ptr(), epilogue, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def pair_columns(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        """The weight `x` [N, K], float32 or bfloat16, in pairs along K (even), for K inputs and N outputs.

        Written into `into`, an earlier result, if that has the shape.
        """
        rows, columns = x.shape
        shape = (rows // PANEL, columns // 2, PANEL, 2)
        out = into if into is not None and into.shape == shape else x.new_empty(shape, dtype=torch.bfloat16)
        self._pair_columns(
            x.data_ptr(), x.dtype == torch.float32, rows, columns, out.data_ptr(), torch.get_num_threads()
        )
        return out

    def pair_rows(self, x: Tensor, length: int) -> Tensor:
        """`x.T` of `x` [N, K], float32 or bfloat16, in pairs along N, padded with zeros to `length` inputs, for K outputs."""
        rows, columns = x.shape
        out = x.new_empty(columns // PANEL, length // 2, PANEL, 2, dtype=torch.bfloat16)
        self._pair_rows(
            x.data_ptr(), x.dtype == torch.float32, rows, columns, length, out.data_ptr(), torch.get_num_threads()
        )
        return out

    def transposed(self, x: Tensor, length: int) -> Tensor:
        """`x.T` [K, length] of `x` [N, K] bfloat16, padded with zeros."""
        out = x.new_empty(x.shape[1], length)
        self._transpose(x.data_ptr(), *x.shape, length, out.data_ptr(), torch.get_num_threads())
        return out

    def weight_gradient(self, gradient: Tensor, x: Tensor, total: Tensor | None = None) -> Tensor:
        """`gradient.T @ x` [N, K] float32 of `gradient` [M, N] and `x` [M, K] bfloat16, added to `total` if there is one."""
        out = x.new_empty(gradient.shape[1], x.shape[1], dtype=torch.float32) if total is None else total
        epilogue = Epilogue.FP32_OUT if total is None else Epilogue.FP32_ACCUMULATE
        for some, others in zip(gradient.split(SLICE), x.split(SLICE), strict=True):
            length = -(-len(some) // BLOCK) * BLOCK
            length += BLOCK if not length % CROWDED else 0
            self.multiply(out, self.transposed(some, length), self.pair_rows(others, length), epilogue=epilogue)
            epilogue = Epilogue.FP32_ACCUMULATE
        return out


def is_for_this_processor() -> bool:
    """True with AVX-512 BF16 but without AMX, with which oneDNN is faster. Compiles nothing."""
    return processor_has("avx512_bf16") and not processor_has("amx_tile")


@functools.cache
def bf16_matmul() -> Bf16Matmul | None:
    """The kernels; None on other processors, without a compiler, or if they disagree with PyTorch."""
    if not is_for_this_processor():
        return None
    return load_verified(SOURCE, (), "Multiplying", Bf16Matmul, _gap, 1e-2, "products differ")


def _gap(matmul: Bf16Matmul) -> float:
    """Largest error of output and gradients against float32, relative to the largest number."""
    generator = torch.Generator().manual_seed(0)
    x, weight, gradient = (torch.randn(size, generator=generator) for size in ((9, 64), (112, 64), (9, 112)))
    x, weight, gradient = x.bfloat16(), weight.bfloat16().float(), gradient.bfloat16()
    mine = [
        matmul.multiply(gradient.new_empty(9, 112), x, matmul.pair_columns(weight), epilogue=Epilogue.SILU),
        matmul.multiply(x.new_empty(9, 64), gradient, matmul.pair_rows(weight, 112)),
        matmul.weight_gradient(gradient, x),
    ]
    wide, grown = x.float(), gradient.float()
    return largest_gap(mine, [F.silu(wide @ weight.t()), grown @ weight, grown.t() @ wide])
