"""Probability ratios between the trained policy and the sampling policy: by token, by sequence, or as a product."""

from typing import Literal

import torch
from torch import Tensor

from covey.algorithms.importance import drawn_logp
from covey.types import TokenBatch

Level = Literal["token", "sequence", "product"]
"""`token`: the ratio of each token. `sequence`: their geometric mean, one a row. `product`: the ratio of the whole sequence."""

LIMIT = 60.0
"""Largest log-ratio that is exponentiated: e^60 is finite in float32, and so is its gradient."""


def log_ratio_of(tokens: TokenBatch, level: Level) -> Tensor:
    """`logp - old_logp` of each token [N, T], its mean over the tokens that count [N, 1], or their sum [N, 1]."""
    if level == "token":
        return tokens.log_ratio
    if level == "sequence":
        return tokens.per_sequence(tokens.log_ratio)
    if level == "product":
        return tokens.log_ratio.sum(-1, keepdim=True)  # log_ratio is 0 off the mask
    raise ValueError(f"level={level!r} is none of token, sequence, product.")


def ratio_of(tokens: TokenBatch, level: Level = "token", limit: float | None = None) -> Tensor:
    """`exp` of the log-ratio, [N, T] or [N, 1], with gradient; exactly 1 on-policy.

    `limit` clips the log-ratio to `+-limit` first (verl: 20), without gradient beyond; None only keeps it finite.
    """
    log_ratio = log_ratio_of(tokens, level)
    bounded = log_ratio.clamp(max=LIMIT) if limit is None else log_ratio.clamp(-limit, limit)
    return bounded.exp()


def approximate_kl(tokens: TokenBatch) -> Tensor:
    """[N, T], `exp(d) - 1 - d` with `d` the log-ratio to the policy that drew the token: `old_logp` where its sampler gave none (k3)."""
    drawn = drawn_logp(tokens)
    log_ratio = tokens.logp.detach() - torch.where(drawn.isnan(), tokens.old_logp, drawn)
    log_ratio = torch.where(tokens.mask, log_ratio, torch.zeros_like(log_ratio))
    return torch.expm1(log_ratio.clamp(max=LIMIT)) - log_ratio
