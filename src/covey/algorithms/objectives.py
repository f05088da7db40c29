"""Policy objectives: the loss of each token, `[N, T]`, or of each sequence, `[N, 1]`. No component divides.

Letters: `d = logp - old_logp`, `r = exp(d)`, `A` the advantage, `sg` no gradient through it. Where a class has a `level`, the
ratio is that of the token, the sequence's geometric mean, or the sequence's product (see `ratios.py`).
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from covey.algorithms.composing import clip_metrics
from covey.algorithms.ratios import Level, log_ratio_of, ratio_of
from covey.errors import ConfigError
from covey.types import Metric, TokenBatch


def sampled_logp(tokens: TokenBatch) -> Tensor:
    """[N, T], log-probabilities by the sampler, and by the learner at the rollout where the sampler said none."""
    if tokens.sampler_logp is None:
        return tokens.old_logp
    return torch.where(tokens.sampler_logp.isnan(), tokens.old_logp, tokens.sampler_logp)


def policy_gradient(tokens: TokenBatch) -> Tensor:
    """REINFORCE: `-A logp`, no ratio. Williams 1992; the objective of GPG (Chu et al. 2025). [N, T]"""
    return -tokens.advantages * tokens.logp


policy_gradient.scales_with_advantage = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Clipped:
    """The clipped surrogate: `-min(r A, clip(r, 1 - low, 1 + high) A)`. PPO, Schulman et al. 2017, eq. 7.

    `high=None` is `low`; larger is DAPO's clip-higher. `delta` bounds the unclipped ratio from above, which matters where
    A < 0 (two-sided clipping, INTELLECT-2 2025). `dual` bounds the loss where A < 0 by `-dual A` (dual clip, Ye et al. 2020).
    `level="sequence"` is GSPO. `limit` clips the log-ratio to `+-limit` (verl: 20).
    """

    low: float = 0.2
    high: float | None = None
    delta: float | None = None
    dual: float | None = None
    level: Level = "token"
    limit: float | None = None
    scales_with_advantage = True

    def __post_init__(self) -> None:
        if isinstance(self.dual, (int, float)) and not self.dual > 1:
            raise ConfigError(
                f"Clipped's dual={self.dual} must be above 1: below, no token of A < 0 would learn on-policy."
            )

    def __call__(self, tokens: TokenBatch) -> Tensor:
        loss = self._two_sided(tokens)
        if self.dual is None:
            return loss
        return torch.where(tokens.advantages < 0, torch.minimum(loss, -self.dual * tokens.advantages), loss)

    def metrics(self, tokens: TokenBatch) -> dict[str, Tensor | Metric]:
        """TRL's `clip_ratio/*`: tokens (sequences, above token level) outside of the range in the direction that is clipped.

        With `dual`, `clip_ratio/dual_mean`: where that bound acts.
        """
        ratio, _ = self._ratios(tokens)
        low = (ratio < 1 - self.low) & (tokens.advantages < 0)
        metrics = clip_metrics(low, (ratio > 1 + self._high) & (tokens.advantages > 0), tokens)
        if self.dual is not None:
            is_worse = self._two_sided(tokens) > -self.dual * tokens.advantages
            metrics["clip_ratio/dual_mean"] = is_worse & (tokens.advantages < 0)
        return metrics

    @property
    def _high(self) -> float:
        return self.low if self.high is None else self.high

    def _two_sided(self, tokens: TokenBatch) -> Tensor:
        ratio, clipped = self._ratios(tokens)
        return -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)

    def _ratios(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        ratio = ratio_of(tokens, self.level, self.limit)
        clipped = ratio.clamp(1 - self.low, 1 + self._high)
        return (ratio if self.delta is None else ratio.clamp(max=self.delta)), clipped


@dataclass(frozen=True)
class QuadraticPenalty:
    """`-(r A - abs(A) / (2 epsilon) (r - 1)^2)`: best at `r = 1 + epsilon sign(A)`, with a gradient everywhere else.

    SPO, Xie et al. 2024, <https://arxiv.org/abs/2401.16025>; for language models CFPO, Cagatan et al. 2026,
    <https://arxiv.org/abs/2601.22801>. `limit` clips the log-ratio to `+-limit`, so that the square stays finite in float32.
    """

    epsilon: float = 0.2
    level: Level = "token"
    limit: float = 40.0
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


@dataclass(frozen=True)
class DRO:
    """`-(A logp - beta / 2 d^2)`: the policy gradient with a quadratic pull back to the policy of the rollout, no ratio and no clip.

    Direct reward optimization as verl's `dro`, `beta` its `dro_beta`; Richemond et al. 2024,
    <https://arxiv.org/abs/2405.19107>, without its learnt value.
    """

    beta: float = 0.1
    scales_with_advantage = False
    exempt: ClassVar[tuple[str, ...]] = ("zero_advantage",)

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ConfigError(f"beta of DRO is {self.beta}; it must be above 0.")

    def __call__(self, tokens: TokenBatch) -> Tensor:
        return 0.5 * self.beta * tokens.log_ratio.square() - tokens.advantages * tokens.logp


@dataclass(frozen=True)
class GSPOToken:
    """GSPO with a gradient of its own for each token: `r_t = sg(s) exp(logp - sg(logp))`, `s` the sequence's geometric mean.

    `-min(r A, clip(r, 1 - low, 1 + high) A)`; the log of `r` is at most `limit`. Equal to GSPO when A is one number a
    sequence. Zheng et al. 2025, section 4.3.
    """

    low: float = 3e-4
    high: float = 4e-4
    limit: float = 10.0
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


@dataclass(frozen=True)
class CISPO:
    """The ratio weighs the gradient of the log-probability and is clipped itself: `-sg(clip(r, low, high)) A logp`.

    `high` and `low` bound the ratio itself, not its distance from 1; `low=None` is no floor. No token loses its gradient.
    MiniMax-M1 2025; a ceiling of 5 as in ScaleRL (Khatri et al. 2025).
    """

    high: float = 5.0
    low: float | None = None
    level: Level = "token"
    limit: float | None = None
    anchor: Literal["old", "sampler"] = "old"
    """Policy that the ratio is to: the learner's at the rollout, or the sampler where it said its log-probabilities, which needs no
    further correction."""
    scales_with_advantage = True

    def __post_init__(self) -> None:
        if not self.high > 0 or (self.low is not None and not 0 <= self.low < self.high):
            raise ConfigError(
                f"CISPO's low={self.low} and high={self.high} bound the ratio itself: high must be above 0, and low from 0 to below it."
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


@dataclass(frozen=True)
class SAPO:
    """A smooth gate instead of a clip: `-A (4 / tau) sigmoid(tau (r - 1))`. Gao et al. 2025.

    `tau` is `positive` where A > 0, else `negative`; larger narrows the gate. At r = 1 the slope is that of `r`.
    """

    positive: float = 1.0
    negative: float = 1.05
    level: Level = "token"
    limit: float | None = None
    scales_with_advantage = True

    def __post_init__(self) -> None:
        if any(isinstance(value, (int, float)) and not value > 0 for value in (self.positive, self.negative)):
            raise ConfigError(f"SAPO's positive={self.positive} and negative={self.negative} must be above 0.")

    def __call__(self, tokens: TokenBatch) -> Tensor:
        ratio = ratio_of(tokens, self.level, self.limit)
        positive, negative = ratio.new_tensor(self.positive), ratio.new_tensor(self.negative)
        tau = torch.where(tokens.advantages > 0, positive, negative)
        return -tokens.advantages * (4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0))


@dataclass(frozen=True)
class DPPO:
    """A trust region on probabilities instead of ratios: `-sg(min(r, ceiling)) A logp` inside of it, 0 outside. Qi et al. 2026.

    Outside is a token whose probability has already moved the way the advantage pushes by more than the bound: `high` where
    A > 0, `low` where A < 0. The distance is that of the two-outcome distributions (this token or another):
    `measure="tv"` `|p - p_old|`, `"kl"` `p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))`. The old policy is the
    sampler where it said its log-probabilities, so no further correction is due.
    """

    low: float = 0.2
    high: float = 0.2
    measure: Literal["tv", "kl"] = "tv"
    ceiling: float = 20.0
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
