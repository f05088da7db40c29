"""Log-probability and entropy of chosen tokens from hidden states, a chunk of tokens at a time.

The `[tokens, V]` logits exist for one chunk only: the forward keeps the hidden states, and the backward computes each
chunk's logits again. Peak memory does not depend on the vocabulary times the sequence length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from covey.kernels import LogitKernels, padded_rows
from covey.learner.lm_head import LinearLogProbability, LogitTransform, chunk_for
from covey.learner.vocabulary_blocks import by_vocabulary
from covey.process.device import onto

R = TypeVar("R")
NEVER = -1e4
"""Logit of a banned token: probability 0 in float32 at any temperature below 50, and finite, so that products are not NaN."""


@dataclass(frozen=True)
class Head:
    """LM head: hidden states to logits, with the scaling and soft cap of some models."""

    project: Callable[[Tensor], Tensor]
    """[M, D] -> [M, V], the output embedding (tied or not, adapters included)."""
    multiply: float = 1.0
    """`logit_scale` (Cohere) or `1 / logits_scaling` (Granite)."""
    softcap: float | None = None
    """`final_logit_softcapping` (Gemma): `cap * tanh(logits / cap)`."""
    in_float32: bool = False
    """Compute the matmul in float32, independent of the weights' dtype and of autocast (ScaleRL, 2025)."""
    banned: tuple[int, ...] = ()
    """Token ids of probability 0."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, D] -> [M, V] float32, or float64 of a model in float64."""
        logits = self._product_in_float32(hidden) if self.in_float32 else self.project(hidden)
        if logits.dtype != torch.float64:
            logits = logits.float()  # bf16 log-softmax is off by 1e-2 at large vocabularies
        if self.multiply != 1.0:
            logits = logits * self.multiply
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if not self.banned:
            return logits
        return logits.index_fill(-1, onto(logits.device, torch.tensor(self.banned)), NEVER)

    def _product_in_float32(self, hidden: Tensor) -> Tensor:
        assert isinstance(self.project, nn.Module)
        weights = {name: _wide(weight) for name, weight in self.project.named_parameters()}
        with torch.autocast(hidden.device.type, enabled=False):
            product: Tensor = torch.func.functional_call(self.project, weights, (_wide(hidden),))
        return product


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x


def score_logits(logits: Tensor, targets: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
    """Log-probability of `targets` [M] and entropy [M] in nats (zeros unless requested) of `logits / temperature` [M, V]."""
    if temperature != 1.0:
        logits = logits / temperature
    log_normalizer = logits.logsumexp(-1)
    logp = logits.gather(-1, targets[:, None]).squeeze(-1) - log_normalizer
    if not entropy:
        return logp, torch.zeros_like(logp)
    # H = log Z - E[logit]; softmax underflows to 0 where a logit is -inf, so mask before the product
    probabilities = (logits - log_normalizer[:, None]).exp()
    expected = (probabilities * logits.masked_fill(probabilities == 0, 0.0)).sum(-1)
    return logp, log_normalizer - expected


def score_tokens(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability [M] and entropy [M] of the `targets` [M] that follow `hidden` [M, D].

    Gradients flow to the hidden states and to the head. `entropy` is zeros unless requested. `chunk`, the number of tokens per
    chunk of logits, affects memory and no value; None chooses it by the vocabulary.
    """
    if not hidden.shape[0]:
        empty = hidden.new_zeros(0, dtype=torch.promote_types(hidden.dtype, torch.float32))  # as of other processes
        return empty, empty
    if is_plain(head.project) and not (head.banned and head.softcap is not None):
        return _fused(hidden, targets, head, temperature, entropy, chunk)
    chunk = chunk or 1024

    def score(rows: Tensor, row_targets: Tensor) -> tuple[Tensor, Tensor]:
        return score_logits(head.logits(rows), row_targets, temperature, entropy)

    pieces = by_chunks(score, hidden.split(chunk), targets.split(chunk))
    logp, entropies = zip(*pieces, strict=True)
    return torch.cat(logp), torch.cat(entropies)


def by_chunks(function: Callable[..., R], *chunks: Sequence[Tensor]) -> list[R]:
    """Results of `function` by chunk, under activation checkpointing: only its inputs are saved for the backward."""
    if not torch.is_grad_enabled():
        return [function(*pair) for pair in zip(*chunks, strict=True)]
    return [checkpoint(function, *pair, use_reentrant=False) for pair in zip(*chunks, strict=True)]


def is_plain(project: Callable[[Tensor], Tensor]) -> bool:
    """True for a plain `nn.Linear`: no adapter, no quantization, no hooks."""
    return type(project) is nn.Linear and not project._forward_hooks and not project._forward_pre_hooks


def _fused(
    hidden: Tensor, targets: Tensor, head: Head, temperature: float, entropy: bool, chunk: int | None
) -> tuple[Tensor, Tensor]:
    linear = head.project
    assert isinstance(linear, nn.Linear)
    dtype = linear.weight.dtype
    if head.in_float32:
        dtype = torch.promote_types(dtype, torch.float32)
    elif torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    chunk = chunk_for(linear.weight.shape[0], chunk, hidden.device)
    transform = LogitTransform(
        head.multiply,
        head.softcap,
        temperature,
        chunk,
        by_vocabulary=None if hidden.device.type == "cpu" else by_vocabulary,
        kernels=LogitKernels.on(
            hidden.device, dtype, linear.weight.shape[0], (head.multiply, head.softcap, temperature)
        ),
    )
    count = hidden.shape[0]
    hidden = hidden.to(dtype).contiguous()
    weight: Tensor = linear.weight
    bias: Tensor | None = linear.bias
    if head.banned:
        bias = weight.new_zeros(weight.shape[0]) if bias is None else bias
        bias = bias.index_fill(0, onto(bias.device, torch.tensor(head.banned)), NEVER / head.multiply)
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    rest = count % transform.chunk
    extra = min(padded_rows(rest), transform.chunk) - rest
    if extra and hidden.device.type == "cpu":
        hidden, targets = F.pad(hidden, (0, 0, 0, extra)), F.pad(targets, (0, extra))
    with torch.autocast(hidden.device.type, enabled=False):
        logp, entropies = LinearLogProbability.apply(hidden, weight, bias, targets, transform, entropy)
    return logp[:count], entropies[:count]
