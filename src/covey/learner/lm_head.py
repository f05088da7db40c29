"""Log-probability and entropy straight from hidden states and the head's weight, in one autograd function.

The forward keeps one normalizer and one entropy a token; the backward computes each chunk's logits again and turns them
into gradients in place. Beside the weight's own gradient nothing as wide as the vocabulary outlives a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.kernels import WeightMatmul

CHUNK_ELEMENTS = 2**23
"""Logits that exist at a time where the chunk is chosen here: 32 MiB in float32."""


@dataclass(frozen=True)
class LogitTransform:
    """What stands between the product with the weight and the softmax."""

    multiply: float
    softcap: float | None
    temperature: float
    chunk: int
    """Tokens at a time."""

    @property
    def scale(self) -> float:
        """What the products are multiplied by where no cap comes between."""
        return self.multiply / self.temperature

    def logits_(self, logits: Tensor) -> Tensor:
        """Of the tempered distribution, in place of the products [m, V]."""
        if self.softcap is None:
            return logits if self.scale == 1.0 else logits.mul_(self.scale)
        return logits.mul_(self.multiply / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def backward_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """The gradient of the products from that of the logits, in place of both."""
        if self.softcap is None:
            return gradient if self.scale == 1.0 else gradient.mul_(self.scale)
        slope = logits.mul_(self.temperature / self.softcap).square_().neg_().add_(1.0)
        return gradient.mul_(slope).mul_(self.scale)


class Workspace:
    """The tensors as wide as the vocabulary, made once and used for every chunk.

    Made anew for each chunk they would leave holes between the results that stay, and the heap would grow with the length.
    """

    def __init__(self, rows: int, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.rows, self.weight = rows, weight
        self.dtype, self.wide = hidden.dtype, torch.promote_types(hidden.dtype, torch.float32)
        self.matmul = WeightMatmul(hidden, weight, bias)

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return self.weight.new_empty(self.rows, self.weight.shape[0], dtype=dtype)

    @cached_property
    def other(self) -> Tensor:
        """[m, V] for whatever is computed from the logits."""
        return self._empty(self.wide)

    @cached_property
    def logits(self) -> Tensor:
        """[m, V], float32 or wider."""
        return self._empty(self.wide)

    @cached_property
    def narrow(self) -> Tensor | None:
        """[m, V] in the type of the products, where that is narrower."""
        return None if self.dtype == self.wide else self._empty(self.dtype)

    def product(self, rows: Tensor) -> Tensor:
        """`rows @ weight.T + bias` [m, V], float32 or wider: a log-softmax in bf16 is off by 1e-2 at large V."""
        found = self.matmul.forward(rows, (self.logits if self.narrow is None else self.narrow)[: rows.shape[0]])
        return found if self.narrow is None else self.logits[: rows.shape[0]].copy_(found)

    def gradient(
        self,
        rows: Tensor,
        shape: LogitTransform,
        known: tuple[Tensor, Tensor, Tensor],
        slopes: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        """[m, V], that of the products, in their type. `known`: targets, normalizers, entropies, each [m].

        `slopes` are the gradients of log-probability and entropy, each [m] or None.
        """
        found = _gradient(shape.logits_(self.product(rows)), self.other[: rows.shape[0]], shape, known, slopes)
        return found if self.narrow is None else self.narrow[: rows.shape[0]].copy_(found)


def _gradient(
    logits: Tensor,
    gradient: Tensor,
    shape: LogitTransform,
    known: tuple[Tensor, Tensor, Tensor],
    slopes: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """`Workspace.gradient` in float32 or wider, in the place of `gradient`; `logits` [m, V] are overwritten."""
    targets, normalizer, entropy = known
    of_logp, of_entropy = slopes
    torch.sub(logits, normalizer[:, None], out=gradient).exp_()  # the probabilities
    if of_entropy is not None:
        slope = (logits - (normalizer - entropy)[:, None]).mul_(of_entropy[:, None])
        slope = slope if of_logp is None else slope.add_(of_logp[:, None])
        gradient.mul_(slope.masked_fill_(logits == -math.inf, 0.0)).neg_()
    elif of_logp is not None:
        gradient.mul_(-of_logp[:, None])
    else:
        gradient.zero_()
    if of_logp is not None:
        gradient.scatter_add_(-1, targets[:, None], of_logp[:, None].to(gradient.dtype))
    return shape.backward_(gradient, logits)


def chunk_for(vocabulary: int, chunk: int | None) -> int:
    """Tokens whose logits exist at a time: `chunk` if given, else what `CHUNK_ELEMENTS` allows, between 16 and 1024."""
    return chunk or min(1024, max(16, CHUNK_ELEMENTS // vocabulary))


class LinearLogProbability(torch.autograd.Function):
    """`(hidden [M, D], weight [V, D], bias [V] or None, targets [M], shape, with_entropy)` -> `logp [M], entropy [M]`.

    With z the tempered logits and p their softmax: log p_y = z_y - log Z and H = log Z - E_p[z], so
    d log p_y / dz = 1_y - p and dH / dz = -p (z - E_p[z]). Products run in the type of `hidden`, which is that of `weight`
    unless `WeightMatmul` reads a float32 weight as it is.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        shape: LogitTransform,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logp, normalizer, entropy = (hidden.new_zeros(hidden.shape[0], dtype=wide) for _ in range(3))
        space = Workspace(min(shape.chunk, hidden.shape[0]), hidden, weight, bias)
        for start in range(0, hidden.shape[0], shape.chunk):
            part = slice(start, start + shape.chunk)
            rows = hidden[part]
            logits, weights = shape.logits_(space.product(rows)), space.other[: rows.shape[0]]
            top = logits.amax(-1, keepdim=True)
            total = torch.sub(logits, top, out=weights).exp_().sum(-1)
            normalizer[part] = total.log() + top.squeeze(-1)
            logp[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - normalizer[part]
            if with_entropy:  # 0 * -inf, a token that cannot happen, counts as 0
                entropy[part] = normalizer[part] - weights.mul_(logits).nansum(-1) / total
            del logits  # before the next chunk's are made
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.shape, ctx.with_entropy = shape, with_entropy
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logp_gradient: Tensor | None, entropy_gradient: Tensor | None) -> Any:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        shape: LogitTransform = ctx.shape
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wide = torch.promote_types(weight.dtype, torch.float32)
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=wide) if wants_bias else None
        space = Workspace(min(shape.chunk, hidden.shape[0]), hidden, weight, bias)
        for start in range(0, hidden.shape[0], shape.chunk):
            part = slice(start, start + shape.chunk)
            rows = hidden[part]
            known = targets[part], normalizer[part], entropy[part]
            slopes = _slopes(logp_gradient, entropy_gradient if ctx.with_entropy else None, part)
            gradient = space.gradient(rows, shape, known, slopes)
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0, dtype=wide)
            if hidden_gradient is not None:
                space.matmul.input_gradient(gradient, hidden_gradient[part])
            if weight_gradient is not None:
                space.matmul.add_weight_gradient(weight_gradient, gradient, rows)
            del gradient  # before the next chunk's is made
        weight_gradient = None if weight_gradient is None else weight_gradient.to(weight.dtype)
        bias_gradient = None if bias_gradient is None else bias_gradient.to(bias.dtype)
        return hidden_gradient, weight_gradient, bias_gradient, None, None, None


def _slopes(of_logp: Tensor | None, of_entropy: Tensor | None, part: slice) -> tuple[Tensor | None, Tensor | None]:
    cut = lambda x: None if x is None else x[part].contiguous()
    return cut(of_logp), cut(of_entropy)
