"""The kernels of live.cpp, called on torch's memory: products of float32 activations with float32 weights as they stand."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from covey.kernels.compile import largest_gap, proven
from covey.kernels.matmul_bf16 import Then

SOURCE = Path(__file__).parent / "cpp" / "live.cpp"
PANEL = 16
"""Rows that are turned together."""


class Kernels:
    """Everything is float32 and contiguous."""

    def __init__(self, found: ctypes.CDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._multiply = found.covey_live
        self._multiply.argtypes, self._multiply.restype = [pointer, *[size] * 3, *[pointer] * 5, size, size], None
        self.share_address = ctypes.cast(found.covey_live_share, pointer).value
        self.turn_address = ctypes.cast(found.covey_live_turn, pointer).value
        """Both for kernels whose threads each call them."""

    def multiply(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        factor: Tensor | None = None,
        then: Then = Then.NOTHING_MORE,
    ) -> Tensor:
        """[M, N]: `x` [M, K] times `weight` [N, K] plus `bias` [N], `then` SiLU of it, or it times `factor` [M, N]."""
        (rows, inside), outside = x.shape, len(weight)
        out, room = x.new_empty(rows, outside), x.new_empty(turned_size(rows, inside))
        self._multiply(
            x.data_ptr(), rows, inside, outside, weight.data_ptr(),
            None if bias is None else bias.data_ptr(), None if factor is None else factor.data_ptr(),
            out.data_ptr(), room.data_ptr(), then, torch.get_num_threads(),
        )  # fmt: skip
        return out


def turned_size(rows: int, inside: int) -> int:
    """Numbers of so many rows that are turned."""
    return -(-rows // PANEL) * PANEL * inside


def is_for_live_weights() -> bool:
    """Whether this is a processor that the products are written for. Nothing is compiled to find out."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


@functools.cache
def kernels() -> Kernels | None:
    """The products of live.cpp; None where there are none, if they are wrong, or where the processor has AVX-512.

    Beside MKL, two threads of a Zen 3, they are mostly two to three times as fast at 4 to 16 rows and 0.9 to 1.5 times at 256
    (benchmarks/live_products.py); with AVX-512 they are not written yet.
    """
    if not is_for_live_weights():
        return None
    return proven(SOURCE, (), "Multiplying while sampling", Kernels, _gap, 1e-5, "products differ")


def _gap(found: Kernels) -> float:
    """The largest difference to PyTorch's products, as a share of the largest number, in panels that are whole and that are not."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, factor = (
        torch.randn(*size, generator=generator, dtype=torch.float32) for size in ((29, 40), (27, 40), (27,), (29, 27))
    )
    plain = F.linear(x, weight, bias)
    mine = [
        found.multiply(x, weight, bias, then=Then.SILU),
        found.multiply(x, weight, bias, factor, Then.TIMES),
        found.multiply(x[:3].contiguous(), weight, bias),
    ]
    return largest_gap(mine, [F.silu(plain), plain * factor, plain[:3]])
