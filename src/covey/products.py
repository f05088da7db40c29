"""Products with weights on CPUs where something is faster than what torch calls.

In float32 oneDNN: torch's builds for x86-64 multiply float32 matrices with MKL, which runs at half of an AMD processor's
AVX-512 (measured on a Zen 5 core: 95 GFLOP/s of MKL, 229 of oneDNN at 3072 x 448 x 128). oneDNN comes with torch and reads
the live weights in place. Its sums fall in another order, so results agree to float32's rounding.

In bfloat16, where the processor multiplies pairs of numbers but has no tiles (AMX), the kernels of `compiled/linear.cpp`:
an eighth faster than oneDNN, with nothing kept for each number of rows, and a weight's gradient in float32.
"""

from __future__ import annotations

import functools
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from covey.compiled import NUMBERS
from covey.compiled.linear import BLOCK, PANEL, Kernels, kernels

KEPT = 580 * 2**10
"""Bytes that oneDNN keeps of each size of product that it meets, in any type of numbers, for as long as the process lives
(measured over a thousand sizes with torch 2.13; limits of its caches free a fifth of it). Building it takes up to a millisecond."""
SMALLEST = 2**20
"""Multiplications below which nothing is gained."""
_torchs_linear = F.linear  # where `FasterProducts` puts its own
PLAIN = (Tensor, nn.Parameter)
"""Types of tensors that kernels may read: none that is spread over processes."""


@functools.cache
def is_onednn_faster() -> bool:
    """Whether this is a processor of AMD's with AVX-512, under a torch that has oneDNN."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def is_mkls(dtype: torch.dtype) -> bool:
    """Whether a CPU's products of this type are MKL's, which keeps nothing of their sizes."""
    return dtype == torch.float32 and torch.backends.mkl.is_available() and not is_onednn_faster()


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
        return _torchs_linear(x, weight, bias)
    return out


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` [.., N] by the faster library, without a gradient."""
    return linear(x, weight, bias) if pays(x, weight) else _torchs_linear(x, weight, bias)


def outer(gradient: Tensor, x: Tensor) -> Tensor:
    """`gradient.T @ x` [N, K], the gradient of a weight from `gradient` [M, N] and `x` [M, K], by oneDNN.

    It copies its first factor so that sums run along memory, so the narrower one comes first.
    """
    if gradient.shape[1] <= x.shape[1]:
        return linear(gradient.t(), x.t(), None)
    return linear(x.t(), gradient.t(), None).t()


def in_pairs(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Kernels | None:
    """The kernels that multiply `x` [.., K], once it is of type `dtype`, with `weight` [N, K]; None where they do not."""
    return _pairs_of(x, weight, dtype or x.dtype) if weight.ndim == 2 and x.shape[-1] == weight.shape[1] else None


def _pairs_of(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Kernels | None:
    """`in_pairs` for `x` [.., K], or a gradient [.., N] of its product."""
    is_fit = (
        dtype == torch.bfloat16
        and weight.dtype in NUMBERS
        and x.is_cpu
        and weight.is_cpu
        and type(x) in PLAIN
        and type(weight) in PLAIN
        and weight.is_contiguous()
        and fits(weight.shape[1], weight.shape[0])
        and x.numel() // x.shape[-1] * weight.numel() >= SMALLEST
    )
    return kernels() if is_fit else None


def fits(inside: int, outside: int) -> bool:
    """Whether a layer of this many inputs and outputs can be multiplied in pairs."""
    return not outside % PANEL and not inside % BLOCK


def takes_any_rows(model: Any, dtype: torch.dtype, least: int) -> bool:
    """Whether nothing is kept for each count of rows from `least` on: in `dtype` all products with this model's weights, beside
    embeddings and head, are in pairs, or MKL's."""
    if is_mkls(dtype):
        return True
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    others = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    others |= {id(parameter) for parameter in (head.parameters() if head is not None else ())}
    own = {id(layer.weight): layer.weight for layer in layers if id(layer.weight) not in others}
    if dtype != torch.bfloat16 or not own or kernels() is None:
        return False
    if any(parameter.ndim > 1 and id(parameter) not in own.keys() | others for parameter in model.parameters()):
        return False  # multiplied by something else
    rows = lambda weight: torch.empty(least, weight.shape[1], dtype=dtype)
    return all(in_pairs(rows(weight), weight) for weight in own.values())


def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` [.., N] in the type of `x`, which `weight` [N, K] and `bias` may differ from; without a gradient."""
    found = in_pairs(x, weight)
    if found is None:
        return product(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    return found.multiply(out, x.contiguous(), found.pair_columns(weight), wide(bias, weight.shape[0]))


def wide(bias: Tensor | None, size: int) -> Tensor | None:
    """`bias` as the kernels read it: [size] float32."""
    return None if bias is None else bias.float().expand(size).contiguous()


def of_input(gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient of what goes in [.., K] from `gradient` [.., N] of `forward`, both of one type."""
    found = _pairs_of(gradient, weight, gradient.dtype)
    if found is None:
        return product(gradient, weight.to(gradient.dtype).t(), None)
    out = gradient.new_empty(*gradient.shape[:-1], weight.shape[1])
    return found.multiply(out, gradient.contiguous(), found.pair_rows(weight, weight.shape[0]))


def of_weight(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of `weight` in its type from `gradient` [M, N] of `forward` of `x` [M, K]; in pairs, it is summed in float32."""
    found = in_pairs(x, weight)
    if found is not None:
        return found.outer(gradient.contiguous(), x.contiguous()).to(weight.dtype)
    sums = outer(gradient, x) if pays(gradient.t(), x.t()) else gradient.t() @ x
    return sums.to(weight.dtype)


class _Linear(torch.autograd.Function):
    """`(x [.., K], weight [N, K], bias [N] or None)` -> [.., N] in the type of `x`, by what is fastest, as is the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.bias = None if bias is None else bias.dtype
        return forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            of_input(gradient, weight) if wants_x else None,
            of_weight(flat, x.reshape(-1, x.shape[-1]), weight) if wants_weight else None,
            flat.sum(0, dtype=ctx.bias) if wants_bias and ctx.bias else None,
        )


class FasterProducts:
    """Inside, linear layers on a CPU are computed by `_Linear` in float32 and bfloat16 where that is faster, forward and backward.

    Nothing else changes, and nothing at all on other machines or in other precisions. Activations that the backward pass
    computes again must be computed inside too: see `fused_layers.Recomputing`.

    It stands in the place of `torch.nn.functional.linear`: a mode would be asked at each of torch's functions, of which a step of
    twelve layers calls thousands. Other threads see it too, and get the same products. What somebody else has put there stays.
    """

    _lock = threading.Lock()
    _inside = 0

    def __enter__(self) -> None:
        with self._lock:
            FasterProducts._inside += 1
            if F.linear is _torchs_linear:
                F.linear = _faster_linear

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            FasterProducts._inside -= 1
            if not FasterProducts._inside and F.linear is _faster_linear:
                F.linear = _torchs_linear


def _faster_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`."""
    x = input
    is_cast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if is_cast else x.dtype
    if is_cast or dtype == weight.dtype:  # else torch refuses
        if x.dtype in NUMBERS and in_pairs(x, weight, dtype):
            return _applied(x.to(dtype), weight, bias)
        if not is_cast and pays(x, weight):
            return _applied(x, weight, bias)
    return _torchs_linear(x, weight, bias)


def _applied(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = _Linear.apply(x, weight, bias)
    return out


def faster_products(device: torch.device) -> AbstractContextManager[Any]:
    """`FasterProducts` for a model on this device where they are any faster, else a context that does nothing."""
    is_any = device.type == "cpu" and (is_onednn_faster() or kernels() is not None)
    return FasterProducts() if is_any else nullcontext()
