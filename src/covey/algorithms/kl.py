"""KL penalty between policy and reference model, token by token, in the loss or in the reward.

With `d = logp - ref_logp`, an estimator of KL(policy || reference) from a token that the policy drew: Schulman 2020,
"Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from covey.algorithms.control import Controller, current
from covey.algorithms.ratios import Level, ratio_of
from covey.declared import Finite, Limit, NotNegative, Positive, checked_dataclass
from covey.errors import ConfigError
from covey.types import Estimator, StepReport, TokenBatch

LIMIT = 60.0
"""Largest log-ratio that is exponentiated: e^60 is finite in float32 with room to add up."""


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """`d`: unbiased in value, high variance, may be negative; its gradient in a loss is 0 on average. [N, T]"""
    return logp - ref_logp


def abs_kl(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """`|d|`. [N, T]"""
    return (logp - ref_logp).abs()


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """`d^2 / 2`: biased in value, but its gradient in a loss is that of the KL, on-policy. [N, T]"""
    return 0.5 * (logp - ref_logp).square()


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """`exp(-d) - 1 + d`: unbiased, never negative, low variance. GRPO, Shao et al. 2024, eq. 4. [N, T]"""
    gap = ref_logp - logp
    return gap.clamp(max=LIMIT).exp() - gap - 1


def full(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """`sum_v p_v (log p_v - log q_v)`, the KL itself over the whole vocabulary, without sampling noise. [..., V] -> [...]

    An estimator with `takes_distribution = True` receives the log-probabilities of every token of the vocabulary instead of
    those that were drawn; the learner calls it on a chunk of positions at a time.
    """
    return (logp.exp() * (logp - ref_logp)).nan_to_num(0.0, posinf=0.0, neginf=0.0).sum(-1)


full.takes_distribution = True  # type: ignore[attr-defined]


@checked_dataclass(frozen=True)
class BoundedK3:
    """k3 as verl computes it: `-d` first clipped to `+-limit`, the result to `+-cap`, without gradient beyond either."""

    limit: Limit = 20.0
    cap: Limit = 10.0

    def __call__(self, logp: Tensor, ref_logp: Tensor) -> Tensor:
        gap = (ref_logp - logp).clamp(-self.limit, self.limit)
        return (gap.exp() - gap - 1).clamp(-self.cap, self.cap)


@dataclass(frozen=True)
class StraightThrough:
    """The value of one estimator with the gradient of another: by default k2's, which is right on-policy (verl's `k3+`)."""

    value: Estimator = k3
    gradient: Estimator = k2

    def __call__(self, logp: Tensor, ref_logp: Tensor) -> Tensor:
        slope = self.gradient(logp, ref_logp)
        return slope - slope.detach() + self.value(logp, ref_logp).detach()


ESTIMATORS: Mapping[str, Estimator] = {
    "k1": k1,
    "kl": k1,
    "full": full,
    "abs": abs_kl,
    "k2": k2,
    "mse": k2,
    "k3": k3,
    "low_var_kl": BoundedK3(),
    "k1+": StraightThrough(k1),
    "kl+": StraightThrough(k1),
    "abs+": StraightThrough(abs_kl),
    "k2+": StraightThrough(k2),
    "mse+": StraightThrough(k2),
    "k3+": StraightThrough(k3),
    "low_var_kl+": StraightThrough(BoundedK3()),
}
"""Estimators by name; `kl`, `mse` and `low_var_kl` are verl's names."""


@checked_dataclass(frozen=True)
class KL:
    """The KL term of an algorithm: `coefficient x estimator(logp, ref_logp)`, added to the loss or taken from the reward.

    `unbiased=True` multiplies it by the probability ratio of `level`, which makes the gradient that of the KL off-policy
    too (DeepSeek-V3.2, 2025). `where="reward"` subtracts it from the reward of each token instead, measured when the
    completion was drawn. `coefficient` may be a controller, such as `AdaptiveKL(target=0.05)`.
    """

    estimator: Estimator = k3
    coefficient: Finite | Controller = 0.04
    where: Literal["loss", "reward"] = "loss"
    unbiased: bool = False
    level: Level = "token"

    def __post_init__(self) -> None:
        if self.takes_distribution and self.where == "reward":
            raise ConfigError("The full-distribution KL acts in the loss; use k1 or k3 with where='reward'.")
        if self.unbiased and self.where == "reward":
            raise ConfigError(
                "unbiased=True acts in the loss; a KL in the reward is measured at the rollout: leave it out."
            )

    @property
    def takes_distribution(self) -> bool:
        """True if the estimator reads the distribution over the whole vocabulary at every position."""
        return bool(getattr(self.estimator, "takes_distribution", False))

    def resolved(self) -> float:
        """The coefficient now; where a controller has not been resolved yet, its start."""
        return current(self.coefficient)

    def measured(self, tokens: TokenBatch) -> Tensor:
        """[N, T], the estimate, ratio included, without the coefficient. Needs `tokens.ref_logp`, or `tokens.full_kl`."""
        if self.takes_distribution:
            if tokens.full_kl is None:
                raise ValueError(
                    "The full-distribution KL needs full_kl, measured by the learner; this batch has none."
                )
            value = tokens.full_kl
        elif tokens.ref_logp is None:
            raise ValueError("KL needs ref_logp, the reference model's log-probabilities; this batch has none.")
        else:
            value = self.estimator(tokens.logp, tokens.ref_logp)
        return value * ratio_of(tokens, self.level) if self.unbiased and self.where == "loss" else value

    def penalty(self, logp: Tensor, ref_logp: Tensor) -> Tensor:
        """The weighted penalty of each token, in the shape of `logp`; `where="reward"` subtracts it from the reward."""
        return self.resolved() * self.estimator(logp, ref_logp)


@checked_dataclass(frozen=True)
class AdaptiveKL:
    """A coefficient that moves until the measured KL is `target`. Ziegler et al. 2019, section 2.2.

    `value *= 1 + clip(kl / target - 1, -0.2, 0.2) * completions / horizon`, from `report[metric]` after each step.
    """

    target: Positive
    start: NotNegative = 0.04
    horizon: Positive = 10_000.0
    metric: str = "kl"

    def init(self) -> float:
        return self.start

    def update(self, value: float, report: StepReport) -> float:
        kl, completions = report[self.metric], report["num_completions"]
        if kl != kl:
            return value
        return self.moved(value, kl, completions if completions == completions else 1.0)

    def moved(self, value: float, kl: float, completions: float) -> float:
        """The next coefficient after a step of `completions` completions at this KL."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return value * (1.0 + error * completions / self.horizon)


def as_kl(kl: Any) -> KL | None:
    """A KL of an estimator or of a coefficient, None for 0; ConfigError for anything else."""
    if isinstance(kl, bool) or not (isinstance(kl, (int, float)) or callable(kl)):
        raise ConfigError(f"kl={kl!r} is neither an alg.KL, nor a coefficient, nor an estimator(logp, ref_logp).")
    if callable(kl):
        return KL(kl)
    return KL(coefficient=kl) if kl else None
