"""Objectives of GRPO's relatives; GRPO's own is `Clipped`. Letters as in `objectives.py`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from covey.algorithms.composing import clip_metrics, metrics_of, needs_whole_step, prepared_in
from covey.algorithms.ratios import Level, log_ratio_of, ratio_of
from covey.declared import Bound, Finite, Limit, NotNegative, Positive, checked_dataclass
from covey.errors import ConfigError
from covey.types import Metric, TokenBatch, Totals, Weight


def sampled_logp(tokens: TokenBatch) -> Tensor:
    """[N, T], log-probabilities by the sampler, and by the learner at the rollout where the sampler said none."""
    if tokens.sampler_logp is None:
        return tokens.old_logp
    return torch.where(tokens.sampler_logp.isnan(), tokens.old_logp, tokens.sampler_logp)


@checked_dataclass(frozen=True)
class QuadraticPenalty:
    """`-(r A - abs(A) / (2 epsilon) (r - 1)^2)`: best at `r = 1 + epsilon sign(A)`, with a gradient everywhere else.

    SPO, Xie et al. 2024, <https://arxiv.org/abs/2401.16025>; for language models CFPO, Cagatan et al. 2026,
    <https://arxiv.org/abs/2601.22801>. `limit` clips the log-ratio to `+-limit`, so that the square stays finite in float32.
    """

    epsilon: Positive = 0.2
    level: Level = "token"
    limit: Limit = 40.0
    scales_with_advantage = True

    def __call__(self, tokens: TokenBatch) -> Tensor:
        ratio = ratio_of(tokens, self.level, self.limit)
        penalty = tokens.advantages.abs() / (2 * self.epsilon) * (ratio - 1).square()
        return penalty - ratio * tokens.advantages

    def metrics(self, tokens: TokenBatch) -> dict[str, Tensor | Metric]:
        """`clip_ratio/*`: tokens beyond the best ratio, which the penalty pulls back."""
        ratio = ratio_of(tokens, self.level, self.limit)
        low = (ratio < 1 - self.epsilon) & (tokens.advantages < 0)
        return clip_metrics(low, (ratio > 1 + self.epsilon) & (tokens.advantages > 0), tokens)


@checked_dataclass(frozen=True)
class DRO:
    """`-(A logp - beta / 2 d^2)`: the policy gradient with a quadratic pull back to the policy of the rollout, no ratio and no clip.

    Direct reward optimization as verl's `dro`, `beta` its `dro_beta`; Richemond et al. 2024,
    <https://arxiv.org/abs/2405.19107>, without its learnt value.
    """

    beta: Positive = 0.1
    scales_with_advantage = False
    exempt: ClassVar[tuple[str, ...]] = ("zero_advantage",)

    def __call__(self, tokens: TokenBatch) -> Tensor:
        return 0.5 * self.beta * tokens.log_ratio.square() - tokens.advantages * tokens.logp


@checked_dataclass(frozen=True)
class GSPOToken:
    """GSPO with a gradient of its own for each token: `r_t = sg(s) exp(logp - sg(logp))`, `s` the sequence's geometric mean.

    `-min(r A, clip(r, 1 - low, 1 + high) A)`; the log of `r` is at most `limit`. Equal to GSPO when A is one number a
    sequence. Zheng et al. 2025, section 4.3.
    """

    low: Bound = 3e-4
    high: Bound = 4e-4
    limit: Limit = 10.0
    scales_with_advantage = True

    def __call__(self, tokens: TokenBatch) -> Tensor:
        ratio = self._ratio(tokens)
        clipped = ratio.clamp(1 - self.low, 1 + self.high)
        return -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)

    def metrics(self, tokens: TokenBatch) -> dict[str, Tensor | Metric]:
        """`clip_ratio/*`, by token."""
        ratio = self._ratio(tokens)
        low = (ratio < 1 - self.low) & (tokens.advantages < 0)
        return clip_metrics(low, (ratio > 1 + self.high) & (tokens.advantages > 0), tokens)

    def _ratio(self, tokens: TokenBatch) -> Tensor:
        token_ratio = tokens.logp - tokens.logp.detach()  # 0 in value; each token's own gradient
        return (token_ratio + log_ratio_of(tokens, "sequence").detach()).clamp(max=self.limit).exp()


@checked_dataclass(frozen=True)
class CISPO:
    """The ratio weighs the gradient of the log-probability and is clipped itself: `-sg(clip(r, low, high)) A logp`.

    `high` and `low` bound the ratio itself, not its distance from 1; `low=None` is no floor. No token loses its gradient.
    MiniMax-M1 2025; a ceiling of 5 as in ScaleRL (Khatri et al. 2025).
    """

    high: Limit = 5.0
    low: NotNegative | None = None
    level: Level = "token"
    limit: Limit | None = None
    anchor: Literal["old", "sampler"] = "old"
    """Policy that the ratio is to: the learner's at the rollout, or the sampler where it said its log-probabilities, which needs no
    further correction."""
    scales_with_advantage = True

    def __post_init__(self) -> None:
        if self.low is not None and not self.low < self.high:
            raise ConfigError(
                f"CISPO's low={self.low} and high={self.high} bound the ratio itself: low must be below high."
            )

    @property
    def needs(self) -> tuple[str, ...]:
        return ("sampler_logp",) if self.anchor == "sampler" else ()

    def __call__(self, tokens: TokenBatch) -> Tensor:
        ratio = self._ratio(tokens).detach()
        return -ratio.clamp(self.low, self.high) * tokens.advantages * tokens.logp

    def metrics(self, tokens: TokenBatch) -> dict[str, Tensor]:
        """`cispo_clip_ratio`: ratio above the ceiling and A > 0, as TRL; `clip_ratio/bounded_mean`: the clip changed the ratio."""
        ratio = self._ratio(tokens)
        above = (ratio > self.high) & (tokens.advantages > 0)
        return {"cispo_clip_ratio": above, "clip_ratio/bounded_mean": ratio != ratio.clamp(self.low, self.high)}

    def _ratio(self, tokens: TokenBatch) -> Tensor:
        if self.anchor == "sampler":
            tokens = replace(tokens, old_logp=sampled_logp(tokens))
        return ratio_of(tokens, self.level, self.limit)


@checked_dataclass(frozen=True)
class SAPO:
    """A smooth gate instead of a clip: `-A (4 / tau) sigmoid(tau (r - 1))`. Gao et al. 2025.

    `tau` is `positive` where A > 0, else `negative`; larger narrows the gate. At r = 1 the slope is that of `r`.
    """

    positive: Positive = 1.0
    negative: Positive = 1.05
    level: Level = "token"
    limit: Limit | None = None
    scales_with_advantage = True

    def __call__(self, tokens: TokenBatch) -> Tensor:
        ratio = ratio_of(tokens, self.level, self.limit)
        positive, negative = ratio.new_tensor(self.positive), ratio.new_tensor(self.negative)
        tau = torch.where(tokens.advantages > 0, positive, negative)
        return -tokens.advantages * (4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0))


@checked_dataclass(frozen=True)
class DPPO:
    """A trust region on probabilities instead of ratios: `-sg(min(r, ceiling)) A logp` inside of it, 0 outside. Qi et al. 2026.

    Outside is a token whose probability has already moved the way the advantage pushes by more than the bound: `high` where
    A > 0, `low` where A < 0. The distance is that of the two-outcome distributions (this token or another):
    `measure="tv"` `|p - p_old|`, `"kl"` `p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))`. The old policy is the
    sampler where it said its log-probabilities, so no further correction is due.
    """

    low: Bound = 0.2
    high: Bound = 0.2
    measure: Literal["tv", "kl"] = "tv"
    ceiling: Limit = 20.0
    needs: ClassVar[tuple[str, ...]] = ("sampler_logp",)
    scales_with_advantage = True

    def __call__(self, tokens: TokenBatch) -> Tensor:
        gap = (tokens.logp - sampled_logp(tokens)).detach().clamp(-20.0, 20.0)
        weight = gap.exp().clamp(max=self.ceiling)
        return -torch.where(self._is_outside(tokens), 0.0, weight) * tokens.advantages * tokens.logp

    def metrics(self, tokens: TokenBatch) -> dict[str, Tensor | Metric]:
        """`clip_ratio/*`: tokens outside of the trust region."""
        outside = self._is_outside(tokens)
        return clip_metrics(outside & (tokens.advantages < 0), outside & (tokens.advantages > 0), tokens)

    def _is_outside(self, tokens: TokenBatch) -> Tensor:
        """[N, T] bool"""
        logp, old_logp = tokens.logp.detach().clamp(max=0.0), sampled_logp(tokens).clamp(max=0.0)
        p, old_p = logp.exp(), old_logp.exp()
        if self.measure == "tv":
            distance = (p - old_p).abs()
        else:
            rest, old_rest = (1 - p).clamp(min=1e-12), (1 - old_p).clamp(min=1e-12)
            distance = old_p * (old_logp - logp) + old_rest * (old_rest / rest).log()
        bound = torch.where(tokens.advantages > 0, distance.new_tensor(self.high), distance.new_tensor(self.low))
        has_moved = torch.where(tokens.advantages > 0, p > old_p, p < old_p)
        return has_moved & (distance > bound)


@checked_dataclass(frozen=True)
class GMPO:
    """The geometric mean of token ratios, clipped in log space against the advantage's sign: `-A exp(mean_t d')`, [N, 1].

    `d' = min(d, high)` where A > 0, `max(d, -low)` where A < 0, 0 where A = 0; `high=None` is `low`. An advantage per token
    enters as its mean. `only` selects the tokens of the mean (a 0/1 weight such as `TopEntropy`); `correction` enters as its
    own geometric mean. `guard` is added to the lengths (verl: 1e-8). Zhao et al. 2025.
    """

    low: Bound = 0.4
    high: Bound | None = None
    only: Weight | None = None
    correction: Weight | None = None
    guard: NotNegative = 0.0
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
        return prepared_in(self, ("only", "correction"), tokens, totals)

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


@checked_dataclass(frozen=True)
class VESPO:
    """A variational weight on whole sequences: `-sg(phi) A logp`, `phi = exp(lambda + k s - lambda exp(s))`. arXiv 2602.10693.

    `s` is the sum of the sequence's log-ratios, each clipped to +-20, plus the log of `correction` (sampler against learner,
    at least 1e-8; summed where it is one a token) where there is one, clipped to `[log 1e-8, 20]`. `k`, `lambda` are the positive
    pair where A >= 0. phi is 1 on-policy.
    """

    k_positive: Finite = 2.0
    lambda_positive: Finite = 3.0
    k_negative: Finite = 3.0
    lambda_negative: Finite = 2.0
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
        return prepared_in(self, ("correction",), tokens, totals)

    def metrics(self, tokens: TokenBatch) -> dict[str, Tensor | Metric]:
        """`vespo/phi_seq_mean`: mean phi over sequences; and the metrics of the correction."""
        return {"vespo/phi_seq_mean": self.weight(tokens), **metrics_of(self.correction, tokens)}
