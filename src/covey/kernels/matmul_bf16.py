"""The kernels of linear.cpp, called on torch's memory: products of bfloat16 numbers in pairs, and what brings numbers into pairs."""

from __future__ import annotations

import ctypes
import functools
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from covey.kernels.compile import largest_gap, processor_has, proven

SOURCE = Path(__file__).parent / "cpp" / "linear.cpp"
PANEL = 16
"""Outputs that are computed together."""
BLOCK = 32
"""Rows, or columns, that are turned together."""
SLICE = 2048
"""Rows, at most, whose outer products are summed before the next: a column of their panels stays in the cache."""
CROWDED = 512
"""Columns, or a multiple of them, that follow each other in too few places of the cache."""


class Then(IntEnum):
    """What is done with a product before it is written, as in vectors.h."""

    NOTHING_MORE, SILU, TIMES, SUMS, MORE_SUMS = range(5)


class Kernels:
    """Everything is contiguous; a weight in pairs is [N / 16, K / 2, 16, 2] bfloat16."""

    def __init__(self, found: ctypes.CDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._multiply, self._turn = found.covey_linear, found.covey_turned
        self._pair_rows, self._pair_columns = found.covey_pair_rows, found.covey_pair_columns
        self._multiply.argtypes = [pointer, *[size] * 3, *[pointer] * 4, size, size]
        self._turn.argtypes = [pointer, *[size] * 3, pointer, size]
        self._pair_rows.argtypes = [pointer, *[size] * 4, pointer, size]
        self._pair_columns.argtypes = [pointer, *[size] * 3, pointer, size]
        for function in (self._multiply, self._turn, self._pair_rows, self._pair_columns):
            function.restype = None
        self.share_address = ctypes.cast(found.covey_linear_share, pointer).value
        """For kernels whose threads each call it."""

    def multiply(
        self,
        out: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        factor: Tensor | None = None,
        then: Then = Then.NOTHING_MORE,
    ) -> Tensor:
        """`out` [.., N]: `x` [.., K] bfloat16 times the paired `weight` plus `bias` [N] float32, `then` SiLU of it, or it
        times `factor` [.., N], in bfloat16; or its SUMS, or MORE_SUMS beside what `out` holds, in float32."""
        inside, outside = 2 * weight.shape[1], PANEL * weight.shape[0]
        self._multiply(
            x.data_ptr(), x.numel() // inside, inside, outside, weight.data_ptr(),
            None if bias is None else bias.data_ptr(), None if factor is None else factor.data_ptr(),
            out.data_ptr(), then, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def pair_columns(self, x: Tensor) -> Tensor:
        """`x` [N, K], float32 or bfloat16, as the weight of a product with K inputs, an even number, and N outputs."""
        rows, columns = x.shape
        out = x.new_empty(rows // PANEL, columns // 2, PANEL, 2, dtype=torch.bfloat16)
        self._pair_columns(
            x.data_ptr(), x.dtype == torch.float32, rows, columns, out.data_ptr(), torch.get_num_threads()
        )
        return out

    def pair_rows(self, x: Tensor, length: int) -> Tensor:
        """`x` [N, K], float32 or bfloat16, as the weight of a product with `length` inputs, N and zeros, and K outputs."""
        rows, columns = x.shape
        out = x.new_empty(columns // PANEL, length // 2, PANEL, 2, dtype=torch.bfloat16)
        self._pair_rows(
            x.data_ptr(), x.dtype == torch.float32, rows, columns, length, out.data_ptr(), torch.get_num_threads()
        )
        return out

    def turned(self, x: Tensor, length: int) -> Tensor:
        """`x.T` [K, length] of `x` [N, K] bfloat16, with zeros behind."""
        out = x.new_empty(x.shape[1], length)
        self._turn(x.data_ptr(), *x.shape, length, out.data_ptr(), torch.get_num_threads())
        return out

    def outer(self, gradient: Tensor, x: Tensor, total: Tensor | None = None) -> Tensor:
        """`gradient.T @ x` [N, K] float32 of `gradient` [M, N] and `x` [M, K] bfloat16, added to `total` if there is one."""
        out = x.new_empty(gradient.shape[1], x.shape[1], dtype=torch.float32) if total is None else total
        then = Then.SUMS if total is None else Then.MORE_SUMS
        for some, others in zip(gradient.split(SLICE), x.split(SLICE), strict=True):
            length = -(-len(some) // BLOCK) * BLOCK
            length += BLOCK if not length % CROWDED else 0
            self.multiply(out, self.turned(some, length), self.pair_rows(others, length), then=then)
            then = Then.MORE_SUMS
        return out


def is_for_this_processor() -> bool:
    """Whether it multiplies pairs, and has no tiles, with which oneDNN is faster. Nothing is compiled to find out."""
    return processor_has("avx512_bf16") and not processor_has("amx_tile")


@functools.cache
def kernels() -> Kernels | None:
    """The products of linear.cpp; None where there are none, where oneDNN has tiles (AMX) to multiply with, or if they are wrong."""
    if not is_for_this_processor():
        return None
    return proven(SOURCE, (), "Multiplying", Kernels, _gap, 1e-2, "products differ")


def _gap(found: Kernels) -> float:
    """The largest difference to products in float32, with SiLU, and of gradients, as a share of the largest number."""
    generator = torch.Generator().manual_seed(0)
    x, weight, gradient = (torch.randn(size, generator=generator) for size in ((9, 64), (112, 64), (9, 112)))
    x, weight, gradient = x.bfloat16(), weight.bfloat16().float(), gradient.bfloat16()
    mine = [
        found.multiply(gradient.new_empty(9, 112), x, found.pair_columns(weight), then=Then.SILU),
        found.multiply(x.new_empty(9, 64), gradient, found.pair_rows(weight, 112)),
        found.outer(gradient, x),
    ]
    wide, grown = x.float(), gradient.float()
    return largest_gap(mine, [F.silu(wide @ weight.t()), grown @ weight, grown.t() @ wide])
