"""float32 matmul with AVX2 that reads the weights in place (`cpp/matmul_fp32.cpp`), for sampling."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from covey.kernels.compile import largest_gap, load_verified

SOURCE = Path(__file__).parent / "cpp" / "matmul_fp32.cpp"
PANEL = 16
"""Rows per transposed panel."""


class Fp32Matmul:
    """Functions of `cpp/matmul_fp32.cpp`. All tensors are float32 and contiguous."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._multiply = library.covey_matmul_fp32
        self._multiply.argtypes, self._multiply.restype = [pointer, *[size] * 3, *[pointer] * 4, size], None
        self.function_pointer = ctypes.cast(library.covey_matmul_fp32_share, pointer).value
        self.transpose_pointer = ctypes.cast(library.covey_transpose_fp32, pointer).value
        """Addresses of the functions that one thread of a parallel region calls, for the decode kernels."""

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias` [M, N] from `x` [M, K], `weight` [N, K]."""
        (rows, in_features), out_features = x.shape, len(weight)
        out, scratch = x.new_empty(rows, out_features), x.new_empty(transposed_size(rows, in_features))
        self._multiply(
            x.data_ptr(), rows, in_features, out_features, weight.data_ptr(), None if bias is None else bias.data_ptr(),
            out.data_ptr(), scratch.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out


def transposed_size(rows: int, in_features: int) -> int:
    """Floats of scratch space for the transposed input of `rows` rows."""
    return -(-rows // PANEL) * PANEL * in_features


@functools.cache
def fp32_matmul() -> Fp32Matmul | None:
    """The kernels; None on processors with AVX-512 or without AVX2, without a compiler, or if they disagree with PyTorch.

    Two threads of a Zen 3: mostly two to three times as fast as MKL with 4 to 16 rows, 0.9 to 1.5 times with 256
    (`benchmarks/matmul_fp32.py`).
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return None
    return load_verified(SOURCE, (), "Multiplying while sampling", Fp32Matmul, _gap, 1e-5, "products differ")


def _gap(matmul: Fp32Matmul) -> float:
    """Largest error against PyTorch, relative to the largest number, with whole and partial panels."""
    generator = torch.Generator().manual_seed(0)
    drawn = lambda *size: torch.randn(size, generator=generator, dtype=torch.float32)
    x, weight, bias = drawn(29, 40), drawn(27, 40), drawn(27)
    results = [matmul.multiply(x, weight, bias), matmul.multiply(x[:3].contiguous(), weight)]
    return largest_gap(results, [F.linear(x, weight, bias), F.linear(x[:3], weight)])
