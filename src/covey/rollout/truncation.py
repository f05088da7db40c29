"""Truncated distributions: top-k, top-p and min-p."""

import math

from torch import Tensor

from covey.rollout.sampler import SamplingParams

HEAD = 512
"""Tokens that top-p sorts at first; rows that need more sort the whole vocabulary."""


def truncate(scores: Tensor, params: SamplingParams) -> Tensor:
    """`scores` with -inf below the highest of the three thresholds. Equal logits stay or go together."""
    size = scores.shape[-1]
    if 0 < params.top_k < size:
        scores = _above(scores, scores.topk(params.top_k, dim=-1).values[:, -1:])
    if params.top_p < 1:
        scores = _above(scores, _nucleus_threshold(scores, params.top_p))
    if params.min_p:
        scores = _above(scores, scores.amax(-1, keepdim=True) + math.log(params.min_p))
    return scores


def _above(scores: Tensor, threshold: Tensor) -> Tensor:
    return scores.masked_fill(scores < threshold, -math.inf)


def _nucleus_threshold(scores: Tensor, top_p: float) -> Tensor:
    """[B, 1], the logit of the last token that top-p keeps: the fewest likeliest ones whose mass reaches `top_p`."""
    log_total = scores.logsumexp(-1, keepdim=True)
    size = scores.shape[-1]
    best = scores.topk(min(HEAD, size), dim=-1).values  # [B, HEAD], falling
    threshold, reached = _nucleus_bounds(best, log_total, top_p)
    if size > HEAD and not bool(reached.all()):
        rest = ~reached
        best = scores[rest].sort(dim=-1, descending=True).values
        threshold[rest] = _nucleus_bounds(best, log_total[rest], top_p)[0]
    return threshold


def _nucleus_bounds(best: Tensor, log_total: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """[B, 1] logit of the last kept token among `best` [B, K] (falling), and [B] whether they reach the mass at all."""
    mass = (best - log_total).exp().cumsum(-1)
    last = (mass < top_p).sum(-1, keepdim=True)
    reached = last.squeeze(-1) < best.shape[-1]
    return best.gather(-1, last.clamp(max=best.shape[-1] - 1)), reached


def kernel_options(params: SamplingParams) -> dict[str, float]:
    """`params` as `TritonDecode.draw_into` takes them."""
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p or 0.0,
        "penalty": params.repetition_penalty,
    }
