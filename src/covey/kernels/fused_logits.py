"""Formulas of the output layer over 16-bit logits, compiled on a GPU: one kernel of a block's statistics, one of its gradient.

As PyTorch's operations these are some ten passes over float32 logits. Here logits are read as the product wrote them, everything between is
float32 in registers, and the gradient is written in the type that the next product reads.
"""

from __future__ import annotations

import logging
import math
from functools import lru_cache

import torch
from torch import Tensor

from covey.kernels.fused_layers import Compile, compiled, strictly_compiled, triton_unavailable_reason
from covey.kernels.trials import outcome, relative_gap

logger = logging.getLogger(__name__)

Shape = tuple[float, float | None, float]
"""Factor, soft cap and temperature between the product and the softmax."""
PLAIN: Shape = (1.0, None, 1.0)


def _tempered(product: Tensor, shape: Shape) -> Tensor:
    multiply, softcap, temperature = shape
    if softcap is None:
        return product.float() * (multiply / temperature)
    return torch.tanh(product.float() * (multiply / softcap)) * (softcap / temperature)


def statistics(product: Tensor, targets: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of `targets` [m], log of the normalizer [m] and entropy [m] of the distribution of `product` [m, V].

    A row is summed in P equal parts, at most 16, which a GPU's processors take side by side: with one program a row most would wait.
    """
    count = math.gcd(product.shape[1], 16)
    logits = _tempered(product, shape).unflatten(1, (count, product.shape[1] // count))  # [m, P, V / P]
    tops = logits.amax(-1).clamp(min=torch.finfo(torch.float32).min)  # a part may hold nothing but -inf
    weights = (logits - tops[..., None]).exp()
    sums = weights.sum(-1)
    expected = torch.where(weights == 0, 0.0, weights * logits).sum(-1)  # 0 * -inf counts as 0
    top = tops.amax(-1)
    share = (tops - top[:, None]).exp()
    total = (sums * share).sum(-1)
    normalizer = total.log() + top
    logp = _tempered(product.gather(-1, targets[:, None]), shape).squeeze(-1) - normalizer
    return logp, normalizer, normalizer - (expected * share).sum(-1) / total


def slopes(
    product: Tensor, place: Tensor, normalizer: Tensor, entropy: Tensor, of_logp: Tensor, of_entropy: Tensor,
    shape: Shape,
) -> Tensor:  # fmt: skip
    """Gradient [m, v] of a block `product` of the vocabulary, in its type.

    `place` [m] is the target's column, any number outside of the block if it is in another; `of_logp` and `of_entropy` [m] are the
    gradients of log-probability and entropy. With p the probabilities: d log p_y / dz = 1_y - p, dH / dz = -p (z - E[z]).
    """
    multiply, softcap, temperature = shape
    logits = _tempered(product, shape)
    probabilities = (logits - normalizer[:, None]).exp()
    slope = of_logp[:, None] + (logits - (normalizer - entropy)[:, None]) * of_entropy[:, None]
    columns = torch.arange(product.shape[1], device=product.device)
    at_target = torch.where(columns == place[:, None], of_logp[:, None], 0.0)
    gradient = at_target - torch.where(probabilities == 0, 0.0, probabilities * slope)
    if softcap is not None:
        gradient = gradient * (1 - (logits * (temperature / softcap)).square())
    return (gradient * (multiply / temperature)).to(product.dtype)


class LogitKernels:
    """Compiled formulas of the output layer."""

    def __init__(self, compile_it: Compile = compiled) -> None:
        self._compile = compile_it

    @staticmethod
    @lru_cache
    def on(device: torch.device, dtype: torch.dtype, vocabulary: int, shape: Shape = PLAIN) -> LogitKernels | None:
        """The kernels for products [m, vocabulary] in `dtype` on this device; None, with the reason in the log, where PyTorch computes."""
        if device.type != "cuda":
            return None
        reason = triton_unavailable_reason(device) or LogitKernels(strictly_compiled).tried(
            device, dtype, vocabulary, shape
        )
        if reason is not None:
            logger.warning("Log-probabilities take ten passes over the logits instead of two: %s.", reason)
        return LogitKernels() if reason is None else None

    def statistics(self, product: Tensor, targets: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
        """As the formula, compiled for each vocabulary: with any width a GPU would read two bytes at a time."""
        torch._dynamo.maybe_mark_dynamic(product, 0)
        result: tuple[Tensor, Tensor, Tensor] = self._compile(statistics)(product, *_of_any_size(targets), shape)
        return result

    def slopes(
        self,
        product: Tensor,
        place: Tensor,
        saved: tuple[Tensor, Tensor],
        of: tuple[Tensor, Tensor],
        shape: Shape,
    ) -> Tensor:
        """As the formula; `saved` are normalizer and entropy, `of` the gradients of log-probability and entropy."""
        saved = saved[0].detach(), saved[1].detach()  # an output of an autograd function is another form
        tensors = product, place, *saved, *of
        result: Tensor = self._compile(slopes)(*_of_any_size(*tensors), shape)
        return result

    def tried(self, device: torch.device, dtype: torch.dtype, vocabulary: int, shape: Shape = PLAIN) -> str | None:
        """Trial of both kernels against the formulas, which is their compilation too: None, or the reason of its failure.

        In the state of an autograd function, as they are used: another one compiles again.
        """
        draw = torch.Generator().manual_seed(0)
        product = torch.randn(37, vocabulary, generator=draw).to(device, dtype)
        targets = torch.randint(vocabulary, (37,), generator=draw).to(device)
        of = torch.randn(37, generator=draw).to(device), torch.randn(37, generator=draw).to(device)

        def trial() -> float:
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                mine = list(self.statistics(product, targets, shape))
                theirs = list(statistics(product, targets, shape))
                saved = theirs[1], theirs[2]
                mine.append(self.slopes(product, targets, saved, of, shape))
                theirs.append(slopes(product, targets, saved[0], saved[1], of[0], of[1], shape))
            return relative_gap(mine, theirs)

        gap = outcome(trial)
        if isinstance(gap, str):
            return f"their kernels do not compile or run here {gap}"
        return None if gap < 1e-2 else f"their kernels differ from PyTorch's operations by {gap:.1g}"


def _of_any_size(*tensors: Tensor) -> tuple[Tensor, ...]:
    for x in tensors:
        for dimension in range(x.ndim):
            torch._dynamo.maybe_mark_dynamic(x, dimension)
    return tensors
