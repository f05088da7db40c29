"""Matrix products of linear layers on a CPU by the fastest library, forward and backward.

In float32 that is oneDNN on AMD processors with AVX-512: torch's builds for x86-64 multiply float32 matrices with MKL, which
reaches half of peak there (one Zen 5 core, 3072 x 448 x 128: 95 GFLOP/s with MKL, 229 with oneDNN). oneDNN comes
with torch and reads the weights in place. It sums in another order, so results agree to float32's rounding.

In bfloat16, on processors with AVX-512 BF16 but without AMX, it is `cpp/matmul_bf16.cpp`: an eighth faster than oneDNN, no code kept
for each shape, and the weight gradient in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from covey.kernels.compile import NUMBERS, is_fake
from covey.kernels.matmul_bf16 import BLOCK, PANEL, Bf16Matmul, bf16_matmul

ONEDNN_BYTES_PER_SHAPE = 580 * 2**10
"""Bytes of compiled code that oneDNN keeps for each matmul shape until the process ends (measured over a thousand shapes with
torch 2.13; limits of its caches free a fifth of it). Compiling one shape takes up to a millisecond."""
MIN_MULTIPLICATIONS = 2**20
"""Multiplications of a matmul below which torch's own library is the fastest."""
PLAIN = (Tensor, nn.Parameter)
"""Tensor types that kernels may read: no DTensor or other subclass."""
WEIGHT_ROWS = 2**14
"""Rows of the head's weight gradient added at a time, because oneDNN cannot accumulate in place."""
MIN_GRADIENT_TOKENS = 256
"""Tokens from which oneDNN's faster matmul outweighs that addition: with 55 tokens and a vocabulary of 152,000 it takes twice as long."""


@functools.cache
def is_onednn_faster() -> bool:
    """True on AMD processors with AVX-512, under a torch that has oneDNN."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """True if oneDNN multiplies `x` [.., K] by `weight` [N, K] faster than torch."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and not is_fake(weight)
        and x.numel() * weight.shape[0] >= MIN_MULTIPLICATIONS
        and is_onednn_faster()
    )


def padded_rows(rows: int) -> int:
    """The next of eight row counts between a power of two and its double (beyond 4096, the next multiple of 256).

    oneDNN compiles, and keeps, code for each row count, so few counts should occur.
    """
    step = 1 << min(8, max(0, (rows - 1).bit_length() - 4))
    return -(-rows // step) * step


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` [.., N] by oneDNN, without a gradient."""
    try:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):  # oneDNN's error when its code does not fit in memory
            raise
        return F.linear(x, weight, bias)
    return out


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` [.., N] by oneDNN or torch, without a gradient of oneDNN's."""
    return onednn_linear(x, weight, bias) if uses_onednn(x, weight) else F.linear(x, weight, bias)


def onednn_weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """`gradient.T @ x` [N, K] from `gradient` [M, N] and `x` [M, K], by oneDNN.

    oneDNN transposes its first factor by a copy, so the narrower factor comes first.
    """
    if gradient.shape[1] <= x.shape[1]:
        return onednn_linear(gradient.t(), x.t(), None)
    return onednn_linear(x.t(), gradient.t(), None).t()


def bf16_for(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Bf16Matmul | None:
    """The bfloat16 kernels for `x` [.., K], cast to `dtype`, times `weight` [N, K]; None where torch multiplies."""
    return _bf16_for(x, weight, dtype or x.dtype) if weight.ndim == 2 and x.shape[-1] == weight.shape[1] else None


def _bf16_for(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Bf16Matmul | None:
    """`bf16_for` an input [.., K], or a gradient [.., N] of the output."""
    is_fit = (
        dtype == torch.bfloat16
        and weight.dtype in NUMBERS
        and x.is_cpu
        and weight.is_cpu
        and type(x) in PLAIN
        and type(weight) in PLAIN
        and weight.is_contiguous()
        and fits_bf16(weight.shape[1], weight.shape[0])
        and x.numel() // x.shape[-1] * weight.numel() >= MIN_MULTIPLICATIONS
    )
    return bf16_matmul() if is_fit else None


def fits_bf16(in_features: int, out_features: int) -> bool:
    """True if the bfloat16 kernels take a layer with this many inputs and outputs."""
    return not out_features % PANEL and not in_features % BLOCK


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` [.., N] in the type of `x`; `weight` [N, K] and `bias` may have another. No gradient."""
    kernels = bf16_for(x, weight)
    if kernels is None:
        return plain_linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    return kernels.multiply(out, x.contiguous(), kernels.pair_columns(weight), float32_bias(bias, weight.shape[0]))


def float32_bias(bias: Tensor | None, size: int) -> Tensor | None:
    """`bias` as the bfloat16 kernels read it: [size] float32."""
    return None if bias is None else bias.float().expand(size).contiguous()


def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """`gradient @ weight` [.., K] from `gradient` [.., N], in its type."""
    kernels = _bf16_for(gradient, weight, gradient.dtype)
    if kernels is None:
        return plain_linear(gradient, weight.to(gradient.dtype).t(), None)
    out = gradient.new_empty(*gradient.shape[:-1], weight.shape[1])
    return kernels.multiply(out, gradient.contiguous(), kernels.pair_rows(weight, weight.shape[0]))


def weight_gradient(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """`gradient.T @ x` in the type of `weight`, from `gradient` [M, N] and `x` [M, K]; bfloat16 kernels sum in float32."""
    kernels = bf16_for(x, weight)
    if kernels is not None:
        return kernels.weight_gradient(gradient.contiguous(), x.contiguous()).to(weight.dtype)
    sums = onednn_weight_gradient(gradient, x) if uses_onednn(gradient.t(), x.t()) else gradient.t() @ x
    return sums.to(weight.dtype)


class _Linear(torch.autograd.Function):
    """`(x [.., K], weight [N, K], bias [N] or None)` -> [.., N] in the type of `x`, by the fastest library, backward too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.bias = None if bias is None else bias.dtype
        return linear_forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            input_gradient(gradient, weight) if wants_x else None,
            weight_gradient(flat, x.reshape(-1, x.shape[-1]), weight) if wants_weight else None,
            flat.sum(0, dtype=ctx.bias) if wants_bias and ctx.bias else None,
        )


def faster_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, with autocast and gradients, by the fastest library."""
    is_cast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if is_cast else x.dtype
    if is_cast or dtype == weight.dtype:  # otherwise torch raises
        if x.dtype in NUMBERS and bf16_for(x, weight, dtype):
            return _applied(x.to(dtype), weight, bias)
        if not is_cast and uses_onednn(x, weight):
            return _applied(x, weight, bias)
    return F.linear(x, weight, bias)


def _applied(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = _Linear.apply(x, weight, bias)
    return out


class FasterLinears:
    """A context in which these modules compute `faster_linear`: those that are exactly `nn.Linear` with their own forward.

    It replaces each module's `forward` and restores it on exit; `torch.nn.functional.linear` is not changed.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.linears = [module for module in modules if type(module) is nn.Linear] if is_any_faster() else []
        self._replaced: list[nn.Linear] = []

    def __enter__(self) -> None:
        self._replaced = [linear for linear in self.linears if "forward" not in linear.__dict__]
        for linear in self._replaced:
            linear.__dict__["forward"] = partial(_forward_of, linear)

    def __exit__(self, *raised: object) -> None:
        for linear in self._replaced:
            if is_routed(linear):
                del linear.__dict__["forward"]
        self._replaced = []


def _forward_of(linear: nn.Linear, x: Tensor) -> Tensor:
    return faster_linear(x, linear.weight, linear.bias)


def is_routed(module: nn.Module) -> bool:
    """True inside of `FasterLinears`."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func is _forward_of


def is_any_faster() -> bool:
    """True if this processor has a faster library than torch's choice, in float32 or bfloat16."""
    return is_onednn_faster() or bf16_matmul() is not None


class WeightMatmul:
    """The three products of a large weight [V, D], chunk by chunk: outputs, input gradient, and weight gradient summed in place."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Choose the library for inputs like `x` [.., D]."""
        self.weight, self.bias = weight, bias
        self.bf16 = bf16_for(x, weight)

    @staticmethod
    def casts_weight(x: Tensor, weight: Tensor) -> bool:
        """True if `weight` must have the type of `x`; the bfloat16 kernels also read float32."""
        return bf16_for(x, weight) is None

    @staticmethod
    def padded_rows(rows: int, device: torch.device) -> int:
        """Rows to compute for `rows`, so that few counts occur on a CPU; see `padded_rows`."""
        return padded_rows(rows) if device.type == "cpu" else rows

    @cached_property
    def _columns(self) -> Tensor:
        """The weight in the kernels' layout for outputs."""
        assert self.bf16 is not None
        return self.bf16.pair_columns(self.weight)

    @cached_property
    def _rows(self) -> Tensor:
        """The weight in the kernels' layout for input gradients."""
        assert self.bf16 is not None
        return self.bf16.pair_rows(self.weight, self.weight.shape[0])

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        """`x @ weight.T + bias` [m, V] in the dtype of `x`, if possible in the buffer `out` [m, V]."""
        if uses_onednn(x, self.weight):
            return onednn_linear(x, self.weight, self.bias)
        if self.bf16 is not None:
            return self.bf16.multiply(out, x, self._columns, float32_bias(self.bias, self.weight.shape[0]))
        torch.mm(x, self.weight.t(), out=out)
        if self.bias is not None:
            out += self.bias
        return out

    def input_gradient(self, gradient: Tensor, out: Tensor) -> None:
        """`out = gradient @ weight`."""
        if self.bf16 is not None:
            self.bf16.multiply(out, gradient, self._rows)
        elif uses_onednn(gradient, self.weight.t()):
            out.copy_(onednn_linear(gradient, self.weight.t(), None))
        else:
            torch.mm(gradient, self.weight, out=out)

    def add_weight_gradient(self, total: Tensor, gradient: Tensor, x: Tensor) -> None:
        """`total += gradient.T @ x`, with the sum over chunks in the type of `total`."""
        if self.bf16 is not None:
            self.bf16.weight_gradient(gradient, x, total)
        elif len(x) >= MIN_GRADIENT_TOKENS and uses_onednn(x.t(), gradient.t()):
            for part in range(0, total.shape[0], WEIGHT_ROWS):
                rows = slice(part, part + WEIGHT_ROWS)
                total[rows] += onednn_weight_gradient(gradient[:, rows].contiguous(), x)
        elif total.dtype == gradient.dtype:
            total.addmm_(gradient.t(), x)
        else:
            total += gradient.t() @ x
