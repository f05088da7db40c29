"""Log-probability and entropy straight from hidden states and the head's weight, in one autograd function.

The forward keeps one normalizer and one entropy a token; the backward computes each chunk's logits again and turns them
into gradients in place. Beside the weight's own gradient nothing as wide as the vocabulary outlives a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ELEMENTS = 2**23
"""Logits that exist at a time where the chunk is chosen here: 32 MiB in float32."""


@dataclass(frozen=True)
class Shape:
    """What stands between the product with the weight and the softmax."""

    multiply: float
    softcap: float | None
    temperature: float
    chunk: int
    """Tokens at a time."""

    def logits(self, raw: Tensor) -> Tensor:
        """Of the tempered distribution, [m, V] float32 or wider, from the product [m, V]."""
        logits = raw if raw.dtype == torch.float64 else raw.float()  # bf16 log-softmax is off by 1e-2 at large V
        if self.softcap is None:
            scale = self.multiply / self.temperature
            return logits if scale == 1.0 else logits * scale
        capped = torch.tanh(logits * (self.multiply / self.softcap))
        return capped.mul_(self.softcap / self.temperature)

    def backward_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """The gradient of the product from that of the logits, in place."""
        if self.softcap is None:
            return gradient.mul_(self.multiply / self.temperature)
        capped = logits * (self.temperature / self.softcap)
        return gradient.mul_(1 - capped.square_()).mul_(self.multiply / self.temperature)


def chunk_for(vocabulary: int, chunk: int | None) -> int:
    """Tokens whose logits exist at a time: `chunk` if given, else what `CHUNK_ELEMENTS` allows, between 16 and 1024."""
    return chunk or min(1024, max(16, CHUNK_ELEMENTS // vocabulary))


class LinearLogProbability(torch.autograd.Function):
    """`(hidden [M, D], weight [V, D], bias [V] or None, targets [M], shape, with_entropy)` -> `logp [M], entropy [M]`.

    With z the tempered logits and p their softmax: log p_y = z_y - log Z and H = log Z - E_p[z], so
    d log p_y / dz = 1_y - p and dH / dz = -p (z - E_p[z]). Products run in the type of `hidden` and `weight`.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, shape: Shape, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        logp, normalizers, entropies = [], [], []
        for rows, row_targets in zip(hidden.split(shape.chunk), targets.split(shape.chunk), strict=True):
            logits = shape.logits(F.linear(rows, weight, bias))
            top = logits.amax(-1, keepdim=True)
            weights = (logits - top).exp_()
            total = weights.sum(-1)
            normalizer = total.log() + top.squeeze(-1)
            normalizers.append(normalizer)
            logp.append(logits.gather(-1, row_targets[:, None]).squeeze(-1) - normalizer)
            if with_entropy:  # 0 * -inf, a token that cannot happen, counts as 0
                entropies.append(normalizer - weights.mul_(logits).nansum(-1) / total)
        normalizer = torch.cat(normalizers)
        entropy = torch.cat(entropies) if with_entropy else torch.zeros_like(normalizer)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.shape, ctx.with_entropy = shape, with_entropy
        ctx.set_materialize_grads(False)
        return torch.cat(logp), entropy

    @staticmethod
    def backward(ctx: Any, logp_gradient: Tensor | None, entropy_gradient: Tensor | None) -> Any:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        shape: Shape = ctx.shape
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wide = torch.promote_types(weight.dtype, torch.float32)
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=wide) if wants_bias else None
        for start in range(0, hidden.shape[0], shape.chunk):
            part = slice(start, start + shape.chunk)
            rows = hidden[part]
            logits = shape.logits(F.linear(rows, weight, bias))
            gradient = (logits - normalizer[part, None]).exp_()  # the probabilities
            if entropy_gradient is not None and ctx.with_entropy:
                expected = normalizer[part] - entropy[part]
                slope = (logits - expected[:, None]).mul_(entropy_gradient[part, None])
                slope = slope if logp_gradient is None else slope.add_(logp_gradient[part, None])
                gradient.mul_(slope.masked_fill_(logits == -math.inf, 0.0)).neg_()
            elif logp_gradient is not None:
                gradient.mul_(-logp_gradient[part, None])
            else:
                gradient.zero_()
            if logp_gradient is not None:
                gradient.scatter_add_(-1, targets[part, None], logp_gradient[part, None].to(gradient.dtype))
            gradient = shape.backward_(gradient, logits)
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0)
            gradient = gradient.to(weight.dtype)
            if hidden_gradient is not None:
                torch.mm(gradient, weight, out=hidden_gradient[part])
            if weight_gradient is not None:
                _add_product(weight_gradient, gradient, rows)
        weight_gradient = None if weight_gradient is None else weight_gradient.to(weight.dtype)
        bias_gradient = None if bias_gradient is None else bias_gradient.to(bias.dtype)
        return hidden_gradient, weight_gradient, bias_gradient, None, None, None


def _add_product(total: Tensor, gradient: Tensor, rows: Tensor) -> None:
    """`total += gradient.T @ rows`, with the sum over chunks in the type of `total`."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.t(), rows)
    else:
        total += gradient.t() @ rows
