"""Matrix products of linear layers on a CPU by the fastest library, forward and backward.

In float32 that is oneDNN on AMD processors with AVX-512: torch's builds for x86-64 multiply float32 matrices with MKL, which
reaches half of peak there (one Zen 5 core, 3072 x 448 x 128: 95 GFLOP/s with MKL, 229 with oneDNN). oneDNN comes
with torch and reads the weights in place. It sums in another order, so results agree to float32's rounding.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from covey.kernels.compile import is_fake
from covey.models import decoder_of

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


def code_bytes_per_product(dtype: torch.dtype) -> int:
    """Bytes of compiled code that oneDNN keeps for each matmul shape of a learner with matmuls in `dtype`, if it is used."""
    return ONEDNN_BYTES_PER_SHAPE if dtype in (torch.bfloat16, torch.float16) or is_onednn_faster() else 0


class _Linear(torch.autograd.Function):
    """`(x [.., K], weight [N, K], bias [N] or None)` -> [.., N], all in float32, by the fastest library, backward too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return plain_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            plain_linear(gradient, weight.t(), None) if wants_x else None,
            _weight_gradient(flat, x.reshape(-1, x.shape[-1])) if wants_weight else None,
            flat.sum(0) if wants_bias else None,
        )


def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """`gradient.T @ x` [N, K] from `gradient` [M, N] and `x` [M, K], by the fastest library."""
    return onednn_weight_gradient(gradient, x) if uses_onednn(gradient.t(), x.t()) else gradient.t() @ x


def faster_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, with autocast and gradients, by the fastest library."""
    if torch.is_autocast_enabled("cpu") or not uses_onednn(x, weight):
        return F.linear(x, weight, bias)
    multiply = _Linear.apply if torch.is_grad_enabled() else onednn_linear
    out: Tensor = multiply(x, weight, bias)
    return out


class FasterLinears:
    """A context in which these modules compute `faster_linear`: those on a CPU that are exactly `nn.Linear` with their own forward.

    It replaces each module's `forward` and restores it on exit; `torch.nn.functional.linear` is not changed. It may be entered again
    once it was left, as a graph may be traversed twice.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        linears = (module for module in modules if type(module) is nn.Linear)
        on_cpu = takewhile(lambda linear: linear.weight.is_cpu, linears)  # lazily: this is made for every pass
        self.linears = list(on_cpu) if is_onednn_faster() else []
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


def is_hooked(module: nn.Module) -> bool:
    """True if calling the module does more than its forward."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks)


def learning(model: nn.Module) -> AbstractContextManager[Any]:
    """`FasterLinears` of this model, for the learner's forward and backward passes; restored on exit.

    A no-op if activations are recomputed by another `context_fn` than `Recomputing`: forward and recomputation must multiply
    by the same library.
    """
    is_recomputed_alike = all(isinstance(context, Recomputing) for context in _contexts_of_recomputing(model))
    return FasterLinears(model.modules()) if is_recomputed_alike else nullcontext()


class Recomputing:
    """A `context_fn` for `torch.utils.checkpoint`: recomputation runs inside `FasterLinears`, like the first forward.

    Autograd recomputes activations outside any context, so the checkpoint must enter one itself.
    """

    def __init__(self, *modules: nn.Module) -> None:
        # decoders alone: copying a decoder, which holds this object, must not copy the head
        self.modules = tuple(map(decoder_of, modules))

    def __call__(self) -> tuple[FasterLinears, FasterLinears]:
        modules = [module for inner in self.modules for module in inner.modules()]
        return FasterLinears(modules), FasterLinears(modules)


def _contexts_of_recomputing(model: nn.Module) -> Iterator[Any]:
    """The `context_fn` of each block with gradient checkpointing."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            function = getattr(module, "_gradient_checkpointing_func", None)
            yield getattr(function, "keywords", {}).get("context_fn")


class WeightMatmul:
    """The three products of a large weight [V, D], chunk by chunk: outputs, input gradient, and weight gradient summed in place."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    @staticmethod
    def padded_rows(rows: int, device: torch.device) -> int:
        """Rows to compute for `rows`, so that few counts occur on a CPU; see `padded_rows`."""
        return padded_rows(rows) if device.type == "cpu" else rows

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        """`x @ weight.T + bias` [m, V] in the dtype of `x`, if possible in the buffer `out` [m, V]."""
        if uses_onednn(x, self.weight):
            return onednn_linear(x, self.weight, self.bias)
        torch.mm(x, self.weight.t(), out=out)
        if self.bias is not None:
            out += self.bias
        return out

    def input_gradient(self, gradient: Tensor, out: Tensor) -> None:
        """`out = gradient @ weight`."""
        if uses_onednn(gradient, self.weight.t()):
            out.copy_(onednn_linear(gradient, self.weight.t(), None))
        else:
            torch.mm(gradient, self.weight, out=out)

    def add_weight_gradient(self, total: Tensor, gradient: Tensor, x: Tensor) -> None:
        """`total += gradient.T @ x`, with the sum over chunks in the type of `total`."""
        if len(x) >= MIN_GRADIENT_TOKENS and uses_onednn(x.t(), gradient.t()):
            for part in range(0, total.shape[0], WEIGHT_ROWS):
                rows = slice(part, part + WEIGHT_ROWS)
                total[rows] += onednn_weight_gradient(gradient[:, rows].contiguous(), x)
        elif total.dtype == gradient.dtype:
            total.addmm_(gradient.t(), x)
        else:
            total += gradient.t() @ x
