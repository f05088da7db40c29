"""Objectives with one weight a sequence: the geometric mean of GMPO, the variational weight of VESPO. Letters as in `objectives.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.algorithms.composing import clip_metrics, metrics_of, needs_whole_step, prepared_fields
from covey.types import Metric, TokenBatch, Totals, Weight


@dataclass(frozen=True)
class GMPO:
    """The geometric mean of token ratios, clipped in log space against the advantage's sign: `-A exp(mean_t d')`, [N, 1].

    `d' = min(d, high)` where A > 0, `max(d, -low)` where A < 0, 0 where A = 0; `high=None` is `low`. An advantage per token
    enters as its mean. `only` selects the tokens of the mean (a 0/1 weight such as `TopEntropy`); `correction` enters as its
    own geometric mean. `guard` is added to the lengths (verl: 1e-8). Zhao et al. 2025.
    """

    low: float = 0.4
    high: float | None = None
    only: Weight | None = None
    correction: Weight | None = None
    guard: float = 0.0
    scales_with_advantage = True

    def __call__(self, tokens: TokenBatch) -> Tensor:
        advantage = tokens.advantages
        raised, lowered = tokens.log_ratio.clamp(max=self._high), tokens.log_ratio.clamp(min=-self.low)
        clipped = torch.where(advantage > 0, raised, torch.where(advantage < 0, lowered, torch.zeros_like(raised)))
        log_mean = self._mean(clipped, tokens, self.only)
        if self.correction is not None:
            weight = self.correction(tokens).detach().expand_as(tokens.mask)
            log_mean = log_mean + self._mean((weight + 1e-10).log(), tokens)
        is_row = advantage.shape[-1] == 1
        return -(advantage if is_row else self._mean(advantage, tokens)) * log_mean.clamp(max=60.0).exp()

    @property
    def exempt(self) -> tuple[str, ...]:
        return () if self.only is None else ("policy_gradient",)

    @property
    def needs(self) -> tuple[str, ...]:
        return (*getattr(self.only, "needs", ()), *getattr(self.correction, "needs", ()))

    @property
    def is_stepwise(self) -> bool:
        return needs_whole_step(self.only) or needs_whole_step(self.correction)

    def prepare(self, tokens: TokenBatch, totals: Totals) -> GMPO:
        """The objective with `only` and `correction` fitted to the whole step."""
        return prepared_fields(self, ("only", "correction"), tokens, totals)

    def metrics(self, tokens: TokenBatch) -> dict[str, Tensor | Metric]:
        """`clip_ratio/*`: tokens that are clipped; and, by the advantage's sign, tokens outside of `[-low, high]` at all."""
        low, high = tokens.log_ratio < -self.low, tokens.log_ratio > self._high
        is_good, is_bad = tokens.advantages > 0, tokens.advantages < 0
        return {
            **clip_metrics(low & is_bad, high & is_good, tokens),
            "clip_ratio/positive_mean": (low | high) & is_good,
            "clip_ratio/negative_mean": (low | high) & is_bad,
        }

    @property
    def _high(self) -> float:
        return self.low if self.high is None else self.high

    def _mean(self, x: Tensor, tokens: TokenBatch, only: Weight | None = None) -> Tensor:
        """[N, 1], mean of `x` over the tokens that count (and that `only` selects); 0 without any."""
        counts = tokens.mask.to(x.dtype)
        if only is not None:
            counts = counts * only(tokens).detach()
        return (counts * x).sum(-1, keepdim=True) / (counts.sum(-1, keepdim=True).clamp(min=1.0) + self.guard)


@dataclass(frozen=True)
class VESPO:
    """A variational weight on whole sequences: `-sg(phi) A logp`, `phi = exp(lambda + k s - lambda exp(s))`. arXiv 2602.10693.

    `s` is the sum of the sequence's log-ratios, each clipped to +-20, plus the log of `correction` (sampler against learner,
    at least 1e-8; summed where it is one a token) where there is one, clipped to `[log 1e-8, 20]`. `k`, `lambda` are the positive
    pair where A >= 0. phi is 1 on-policy.
    """

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0
    correction: Weight | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(getattr(self.correction, "needs", ()))

    scales_with_advantage = True

    def __call__(self, tokens: TokenBatch) -> Tensor:
        return -self.weight(tokens) * tokens.advantages * tokens.logp

    def weight(self, tokens: TokenBatch) -> Tensor:
        """phi, [N, 1] (or [N, T] where the advantage is one a token), without gradient."""
        floor, ceiling = math.log(1e-8), 20.0
        total = tokens.log_ratio.detach().clamp(-20.0, 20.0).sum(-1, keepdim=True)
        if self.correction is not None:
            log_weight = self.correction(tokens).detach().log().clamp(floor, ceiling)
            if log_weight.shape[-1] > 1:  # one a token; that of a sequence is the product already
                log_weight = torch.where(tokens.mask, log_weight, torch.zeros_like(log_weight)).sum(-1, keepdim=True)
            total = total + log_weight
        total = total.clamp(floor, ceiling)
        is_positive = tokens.advantages >= 0
        pick = lambda yes, no: torch.where(is_positive, total.new_tensor(yes), total.new_tensor(no))
        k, rate = pick(self.k_positive, self.k_negative), pick(self.lambda_positive, self.lambda_negative)
        return (rate + k * total - rate * total.exp()).exp()

    @property
    def is_stepwise(self) -> bool:
        return needs_whole_step(self.correction)

    def prepare(self, tokens: TokenBatch, totals: Totals) -> VESPO:
        """The objective with `correction` fitted to the whole step."""
        return prepared_fields(self, ("correction",), tokens, totals)

    def metrics(self, tokens: TokenBatch) -> dict[str, Tensor | Metric]:
        """`vespo/phi_seq_mean`: mean phi over sequences; and the metrics of the correction."""
        return {"vespo/phi_seq_mean": self.weight(tokens), **metrics_of(self.correction, tokens)}
