"""float32 products with weights on CPUs where oneDNN is faster than the BLAS that torch calls.

torch's builds for x86-64 multiply float32 matrices with MKL, which runs at half of an AMD processor's AVX-512 (measured on
a Zen 5 core: 95 GFLOP/s of MKL, 229 of oneDNN at 3072 x 448 x 128). oneDNN comes with torch and reads the live weights in
place. Its sums fall in another order, so results agree to float32's rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

KEPT = 580 * 2**10
"""Bytes that oneDNN keeps of each size of product that it meets, in any type of numbers, for as long as the process lives
(measured over a thousand sizes with torch 2.13; limits of its caches free a fifth of it). Building it takes up to a millisecond."""
SMALLEST = 2**20
"""Multiplications below which nothing is gained."""


@functools.cache
def is_onednn_faster() -> bool:
    """Whether this is a processor of AMD's with AVX-512, under a torch that has oneDNN."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def pays(x: Tensor, weight: Tensor) -> bool:
    """Whether `x` [.., K] times `weight` [N, K] is for oneDNN."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.numel() * weight.shape[0] >= SMALLEST
        and is_onednn_faster()
    )


def repeating(rows: int) -> int:
    """The next of the eight counts of rows between a power of two and its double, so that sizes of products are few and return.

    Beyond 4096 rows, the next multiple of 256.
    """
    step = 1 << min(8, max(0, (rows - 1).bit_length() - 4))
    return -(-rows // step) * step


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` [.., N] by oneDNN, without a gradient."""
    try:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):  # what oneDNN says where memory has no room for its code
            raise
        return F.linear(x, weight, bias)
    return out


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` [.., N] by the faster library, without a gradient."""
    return linear(x, weight, bias) if pays(x, weight) else F.linear(x, weight, bias)


def outer(gradient: Tensor, x: Tensor) -> Tensor:
    """`gradient.T @ x` [N, K], the gradient of a weight from `gradient` [M, N] and `x` [M, K], by oneDNN.

    It copies its first factor so that sums run along memory, so the narrower one comes first.
    """
    if gradient.shape[1] <= x.shape[1]:
        return linear(gradient.t(), x.t(), None)
    return linear(x.t(), gradient.t(), None).t()


class _Linear(torch.autograd.Function):
    """`(x [.., K], weight [N, K], bias [N] or None)` -> [.., N], all three products by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            linear(gradient, weight.t(), None) if wants_x else None,
            outer(flat, x.reshape(-1, x.shape[-1])) if wants_weight else None,
            flat.sum(0) if wants_bias and ctx.has_bias else None,
        )


class FasterProducts(TorchFunctionMode):
    """Inside, linear layers on a CPU in float32 are computed by oneDNN where that is faster, forward and backward.

    Nothing else changes, and nothing at all on other machines, in other precisions, or under autocast. Activations that the
    backward pass computes again must be computed inside too: see `fused_layers.Recomputing`.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is F.linear and not kwargs and not torch.is_autocast_enabled("cpu") and pays(args[0], args[1]):
            return _Linear.apply(args[0], args[1], args[2] if len(args) > 2 else None)
        return function(*args, **(kwargs or {}))


def faster_products(device: torch.device) -> AbstractContextManager[Any]:
    """`FasterProducts` for a model on this device where they are any faster, else a context that does nothing."""
    return FasterProducts() if device.type == "cpu" and is_onednn_faster() else nullcontext()
