"""RMSNorm and gated SiLU with their gradients (`cpp/layers.cpp`)."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from covey.kernels import fused_layers as formulas
from covey.kernels import gates
from covey.kernels.compile import NUMBERS, largest_gap, load_verified
from covey.kernels.norms import rms_norm

SOURCE = Path(__file__).parent / "cpp" / "layers.cpp"
LANES = 16
"""Elements per SIMD vector; widths must be multiples."""
_EXACT, _ROUNDED = 1e-5, 2e-2
"""Allowed error against PyTorch relative to the largest number, in float32 and in bfloat16."""


class LayerKernels:
    """Functions for a residual stream in one dtype and matmuls in the same or another. Tensors are contiguous unless stated."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        kinds = {
            "norm": [pointer] * 4 + [size, size, real, size],
            "norm_backward": [pointer] * 6 + [size] * 3,
            "gate": [pointer] * 3 + [size] * 2,
            "gate_backward": [pointer] * 5 + [size] * 3,
        }
        self._call = {name: getattr(library, f"covey_{name}") for name in kinds}
        for name, function in self._call.items():
            function.argtypes, function.restype = kinds[name], None

    def norm(self, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """RMSNorm of `x` [.., D] with `weight` [D] float32, in `dtype`, and the inverse root mean squares [..] float32."""
        out = torch.empty(x.shape, dtype=dtype)
        scales = torch.empty(x.shape[:-1], dtype=torch.float32)
        self._call["norm"](
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), scales.data_ptr(),
            scales.numel(), x.shape[-1], epsilon, torch.get_num_threads(),
        )  # fmt: skip
        return out, scales

    def norm_backward(self, gradient: Tensor, x: Tensor, weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of `x` [.., D] and of `weight` [D] float32."""
        threads = torch.get_num_threads()
        out = torch.empty(x.shape, dtype=x.dtype)
        sums = torch.zeros(threads, x.shape[-1], dtype=torch.float32)
        self._call["norm_backward"](
            gradient.data_ptr(), x.data_ptr(), weight.data_ptr(), scales.data_ptr(), out.data_ptr(),
            sums.data_ptr(), scales.numel(), x.shape[-1], threads,
        )  # fmt: skip
        return out, sums.sum(0)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """`silu(gate) * up`."""
        out = torch.empty(gate.shape, dtype=gate.dtype)
        self._call["gate"](
            gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.numel(), torch.get_num_threads()
        )  # fmt: skip
        return out

    def gate_backward(
        self, gradient: Tensor, gate: Tensor, up: Tensor, *, repeats: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Gradients of `gate` and `up`. With `repeats`, `gradient` is overwritten by `silu(gate) * up`."""
        gradients = torch.empty(gate.shape, dtype=gate.dtype), torch.empty(gate.shape, dtype=gate.dtype)
        self._call["gate_backward"](
            gradient.data_ptr(), gate.data_ptr(), up.data_ptr(), *(x.data_ptr() for x in gradients), gate.numel(), repeats,
            torch.get_num_threads(),
        )  # fmt: skip
        return gradients


def layer_kernels(stream: torch.dtype, products: torch.dtype) -> LayerKernels | None:
    """The kernels for these dtypes; None if there are none. The first call compiles and verifies them."""
    is_supported = stream in NUMBERS and products in NUMBERS and (stream == torch.float32 or stream == products)
    return _verified(stream, products) if is_supported else None


@functools.cache
def _verified(stream: torch.dtype, products: torch.dtype) -> LayerKernels | None:
    defines = f"STREAM={NUMBERS[stream]}", f"NUMBER={NUMBERS[products]}"
    most = _EXACT if products == torch.float32 else _ROUNDED
    gap = lambda kernels: _gap(kernels, stream, products)
    return load_verified(SOURCE, defines, "Computing layers", LayerKernels, gap, most, "they differ")


def _gap(kernels: LayerKernels, stream: torch.dtype, products: torch.dtype) -> float:
    """Largest error of values and gradients against the formulas in float32, relative to the largest number.

    Gradients are computed without autograd: this may run inside a forward pass whose hooks count saved tensors.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = lambda *shape: torch.randn(shape, generator=generator)
    x, weight = drawn(5, 32).to(stream).float(), drawn(32)
    gradient, gate, up = (drawn(5, 32).to(products).float() for _ in range(3))
    expected = [
        rms_norm(x, weight, 1e-6, torch.float32),
        *formulas.rms_norm_backward(gradient, x, weight, 1e-6, torch.float32),
        gates.gated(gate, up),
        *gates.gated_backward(gradient, gate, up),
    ]
    half = lambda y: y.to(products)
    out, taken = kernels.norm(x.to(stream), weight, 1e-6, products)
    results = [
        out,
        *kernels.norm_backward(half(gradient), x.to(stream), weight, taken),
        kernels.gate(half(gate), half(up)),
        *kernels.gate_backward(half(gradient), half(gate), half(up)),
    ]
    return largest_gap(results, expected)
