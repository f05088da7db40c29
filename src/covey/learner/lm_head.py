"""Fused LM head: log-probability and entropy from hidden states and the head's weight, in one autograd function.

The forward saves one normalizer and one entropy per token; the backward recomputes logits, a part at a time, and turns them
into gradients in place. No [tokens, V] tensor outlives its part. On a CPU a part is a chunk of
tokens, forward and backward. On an accelerator the backward's part is a block of the vocabulary for all tokens: the normalizers
are known, so each block of the weight's gradient is computed once per micro-batch and never read again.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.kernels import LogitKernels
from covey.process.memory import device_memory

CPU_ELEMENTS = 2**23
"""Elements of a logits chunk on a CPU: 32 MiB in float32, for its caches."""
BYTES_AN_ELEMENT = 20
"""Workspace bytes per logit: logits and their gradient in float32, both in bfloat16, float32 temporaries of the entropy's gradient."""
DEVICE_SHARE = 32
"""Divisor of an accelerator's total memory that gives the size of the workspace."""
MOST_ELEMENTS = 2**27
"""Largest logits chunk on an accelerator, in elements: 880 tokens of a vocabulary of 152,000, 2.5 GiB of workspace. An H100, with less than
80 GiB, has half. Matmuls of this size are compute-bound, not memory-bound (by calculation for an H100; not measured)."""


@dataclass(frozen=True)
class LogitTransform:
    """Scale, soft cap and temperature between the output matmul and the softmax."""

    multiply: float
    softcap: float | None
    temperature: float
    chunk: int
    """Tokens per chunk of logits."""
    by_vocabulary: Callable[..., tuple[Tensor | None, ...]] | None = None
    """Backward by blocks of the vocabulary over all tokens (`vocabulary_blocks`); None: by chunks of tokens."""
    kernels: LogitKernels | None = None
    """Compiled formulas over the product's own type, on a GPU."""

    @property
    def constants(self) -> tuple[float, float | None, float]:
        """Factor, soft cap and temperature."""
        return self.multiply, self.softcap, self.temperature

    @property
    def scale(self) -> float:
        """Factor of the matmul's output without a soft cap."""
        return self.multiply / self.temperature

    def logits_(self, logits: Tensor) -> Tensor:
        """Logits of the tempered distribution, in place of the matmul's output [m, V]."""
        if self.softcap is None:
            return logits if self.scale == 1.0 else logits.mul_(self.scale)
        return logits.mul_(self.multiply / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def backward_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Gradient of the matmul's output from that of the logits, in place."""
        if self.softcap is None:
            return gradient if self.scale == 1.0 else gradient.mul_(self.scale)
        slope = logits.mul_(self.temperature / self.softcap).square_().neg_().add_(1.0)
        return gradient.mul_(slope).mul_(self.scale)


class Workspace:
    """Vocabulary-wide buffers, allocated once and reused for every chunk.

    Allocating them per chunk would fragment the heap, which would grow with the sequence length.
    """

    def __init__(self, rows: int, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.rows, self.weight, self.bias = rows, weight, bias
        self.dtype, self.wide = hidden.dtype, torch.promote_types(hidden.dtype, torch.float32)

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return self.weight.new_empty(self.rows, self.weight.shape[0], dtype=dtype)

    @cached_property
    def other(self) -> Tensor:
        """[m, V] buffer for results computed from the logits."""
        return self._empty(self.wide)

    @cached_property
    def logits(self) -> Tensor:
        """[m, V], float32 or wider."""
        return self._empty(self.wide)

    @cached_property
    def narrow(self) -> Tensor | None:
        """[m, V] buffer in the dtype of the matmul, if that is narrower; else None."""
        return None if self.dtype == self.wide else self._empty(self.dtype)

    def narrow_product(self, rows: Tensor) -> Tensor:
        """`rows @ weight.T + bias` [m, V] in the type of the matmul."""
        out = (self.logits if self.narrow is None else self.narrow)[: rows.shape[0]]
        torch.mm(rows, self.weight.t(), out=out)
        return out if self.bias is None else out.add_(self.bias)

    def product(self, rows: Tensor) -> Tensor:
        """`rows @ weight.T + bias` [m, V], float32 or wider: a log-softmax in bf16 is off by 1e-2 at large V."""
        product = self.narrow_product(rows)
        return product if self.narrow is None else self.logits[: rows.shape[0]].copy_(product)

    def gradient(
        self,
        rows: Tensor,
        transform: LogitTransform,
        saved: tuple[Tensor, Tensor, Tensor],
        slopes: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        """Gradient [m, V] of the matmul's output, in its dtype. `saved`: targets, normalizers, entropies, each [m].

        `slopes` are the gradients of log-probability and entropy, each [m] or None.
        """
        logits, other = transform.logits_(self.product(rows)), self.other[: rows.shape[0]]
        result = logit_gradient(logits, other, transform, saved, slopes)
        return result if self.narrow is None else self.narrow[: rows.shape[0]].copy_(result)


def logit_gradient(
    logits: Tensor,
    gradient: Tensor,
    transform: LogitTransform,
    saved: tuple[Tensor, Tensor, Tensor],
    slopes: tuple[Tensor | None, Tensor | None],
    inside: Tensor | None = None,
) -> Tensor:
    """`Workspace.gradient` in float32 or wider, written to `gradient`; `logits` [m, V] are overwritten.

    `inside` [m] bool: tokens whose target is among these columns; None: all.
    """
    targets, normalizer, entropy = saved
    of_logp, of_entropy = slopes
    torch.sub(logits, normalizer[:, None], out=gradient).exp_()  # probabilities
    if of_entropy is not None:
        slope = (logits - (normalizer - entropy)[:, None]).mul_(of_entropy[:, None])
        slope = slope if of_logp is None else slope.add_(of_logp[:, None])
        gradient.mul_(slope.masked_fill_(logits == -math.inf, 0.0)).neg_()
    elif of_logp is not None:
        gradient.mul_(-of_logp[:, None])
    else:
        gradient.zero_()
    if of_logp is not None:
        of_target = of_logp.to(gradient.dtype) if inside is None else of_logp.to(gradient.dtype) * inside
        gradient.scatter_add_(-1, targets[:, None], of_target[:, None])
    return transform.backward_(gradient, logits)


def chunk_for(
    vocabulary: int, chunk: int | None, device: torch.device | None = None, *, elements: int | None = None
) -> int:
    """Tokens per chunk of logits: `chunk` if given, else `elements_at_a_time(device) / vocabulary`.

    At least 16, and at most 1024 on a CPU and 8192 elsewhere. The hidden size does not matter: it changes the cost of a matmul, not
    the memory of a logit. `elements`: elements of a chunk on an accelerator that is absent.
    """
    on_cpu = elements is None and (device is None or device.type == "cpu")
    return chunk or min(1024 if on_cpu else 8192, max(16, (elements or elements_at_a_time(device)) // vocabulary))


def elements_at_a_time(device: torch.device | None) -> int:
    """Elements of a logits chunk: `min(2**27, memory / 32 / 20)`, rounded down to a power of two; 2**23 on a CPU.

    `memory` is the accelerator's total memory: with its free memory, the order of sums would differ between runs.
    """
    total = None if device is None else device_memory(device)
    return CPU_ELEMENTS if total is None else elements_of(total)


def elements_of(total: int) -> int:
    """Elements of a logits chunk on an accelerator with `total` bytes."""
    elements = min(MOST_ELEMENTS, total // DEVICE_SHARE // BYTES_AN_ELEMENT)
    return max(CPU_ELEMENTS, 1 << max(0, elements.bit_length() - 1))


class LinearLogProbability(torch.autograd.Function):
    """`(hidden [M, D], weight [V, D], bias [V] or None, targets [M], transform, with_entropy)` -> `logp [M], entropy [M]`.

    With z the tempered logits and p their softmax: log p_y = z_y - log Z and H = log Z - E_p[z], so
    d log p_y / dz = 1_y - p and dH / dz = -p (z - E_p[z]). Matmuls run in the dtype of `hidden`, which is that of `weight`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        space = Workspace(min(transform.chunk, hidden.shape[0]), hidden, weight, bias)
        pieces = []
        for start in range(0, hidden.shape[0], transform.chunk):
            part = slice(start, start + transform.chunk)
            pieces.append(_statistics(space, hidden[part], targets[part], transform, with_entropy))
        logp, normalizer, entropy = map(torch.cat, zip(*pieces, strict=True))  # copies would be a launch each
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.transform, ctx.with_entropy = transform, with_entropy
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logp_gradient: Tensor | None, entropy_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        transform: LogitTransform = ctx.transform
        wants_hidden, wants_weight, wants_bias = needed = ctx.needs_input_grad[:3]
        if transform.by_vocabulary is not None:
            saved = targets, normalizer, entropy
            slopes = _slopes(logp_gradient, entropy_gradient if ctx.with_entropy else None, slice(None))
            return *transform.by_vocabulary(hidden, weight, bias, transform, saved, slopes, needed), None, None, None
        wide = torch.promote_types(weight.dtype, torch.float32)
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=wide) if wants_bias else None
        space = Workspace(min(transform.chunk, hidden.shape[0]), hidden, weight, bias)
        for start in range(0, hidden.shape[0], transform.chunk):
            part = slice(start, start + transform.chunk)
            rows = hidden[part]
            saved = targets[part], normalizer[part], entropy[part]
            slopes = _slopes(logp_gradient, entropy_gradient if ctx.with_entropy else None, part)
            gradient = space.gradient(rows, transform, saved, slopes)
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0, dtype=wide)
            if hidden_gradient is not None:
                torch.mm(gradient, weight, out=hidden_gradient[part])
            if weight_gradient is not None and weight_gradient.dtype == gradient.dtype:
                weight_gradient.addmm_(gradient.t(), rows)
            elif weight_gradient is not None:
                weight_gradient += gradient.t() @ rows
            del gradient  # freed before the next chunk's gradient
        weight_gradient = None if weight_gradient is None else weight_gradient.to(weight.dtype)
        bias_gradient = None if bias_gradient is None else bias_gradient.to(bias.dtype)
        return hidden_gradient, weight_gradient, bias_gradient, None, None, None


def _statistics(
    space: Workspace, rows: Tensor, targets: Tensor, transform: LogitTransform, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of `targets`, log of the normalizer and entropy, zeros without, of a chunk of hidden states: each [m]."""
    if transform.kernels is not None:
        product = space.narrow_product(rows)
        logp, normalizer, entropy = transform.kernels.statistics(product, targets, transform.constants)
        return logp, normalizer, entropy if with_entropy else torch.zeros_like(entropy)
    logits, weights = transform.logits_(space.product(rows)), space.other[: rows.shape[0]]
    top = logits.amax(-1, keepdim=True)
    total = torch.sub(logits, top, out=weights).exp_().sum(-1)
    normalizer = total.log() + top.squeeze(-1)
    logp = logits.gather(-1, targets[:, None]).squeeze(-1) - normalizer
    expected = weights.mul_(logits).nansum(-1) / total if with_entropy else normalizer  # 0 * -inf counts as 0
    return logp, normalizer, normalizer - expected


def _slopes(of_logp: Tensor | None, of_entropy: Tensor | None, part: slice) -> tuple[Tensor | None, Tensor | None]:
    cut = lambda x: None if x is None else x[part].contiguous()
    return cut(of_logp), cut(of_entropy)
