"""Importance weights between the sampler and the learner: corrections and rejections, without gradient.

`e = old_logp - sampler_logp` is how the learner's numbers differ from the sampler's for the same weights; a log-probability
that the sampler did not give counts as equal, and so do those of a row that was drawn in this process with the same weights
(`TokenBatch.same_weights`): summed over a long completion, rounding would leave out whole completions. A weight multiplies the objective, never the KL; denominators do not change.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from covey.declared import Bound, Limit, Measured, checked_dataclass
from covey.errors import ConfigError
from covey.types import Max, Mean, Metric, Min, TokenBatch, Totals

LIMIT = 60.0


def mismatch(tokens: TokenBatch, against: Literal["old", "current"] = "old", drawn: Tensor | None = None) -> Tensor:
    """[N, T], `e`: log-probability by the learner minus `drawn`, by default the sampler's; 0 off the mask and where the sampler gave none.

    `against="current"` takes the learner's current policy instead of its policy at the rollout.
    """
    if tokens.sampler_logp is None:
        return torch.zeros_like(tokens.old_logp)
    drawn = tokens.sampler_logp if drawn is None else drawn
    ours = tokens.old_logp if against == "old" else tokens.logp.detach()
    has_logp = tokens.mask & ~drawn.isnan()
    return torch.where(has_logp, ours - drawn.nan_to_num(0.0), torch.zeros_like(ours))


def drawn_logp(tokens: TokenBatch) -> Tensor:
    """[N, T], the policy that drew the tokens: `sampler_logp`, NaN where it gave none; `old_logp` where the two differ by rounding alone."""
    if tokens.sampler_logp is None:
        return tokens.old_logp
    if tokens.same_weights is None:
        return tokens.sampler_logp
    return torch.where(tokens.same_weights[:, None], tokens.old_logp, tokens.sampler_logp)


@checked_dataclass(frozen=True)
class Correction:
    """Importance weight `exp(e)` of each token, or of the whole sequence (`exp(sum e)`), kept within `[low, high]`.

    `mode="truncate"` clips it into the bounds, `"mask"` makes it 0 outside (IcePop, sequence-level masked importance
    sampling); None is no bound. `normalize` divides by its mean over the step (verl's batch normalisation). `limit` clips the
    log-weight to `+-limit` first (verl: 20). 1 where the sampler said nothing. Defaults are TRL 1.16's.
    """

    level: Literal["token", "sequence"] = "sequence"
    mode: Literal["truncate", "mask"] = "mask"
    high: Bound | None = 3.0
    low: Bound | None = None
    normalize: bool = False
    limit: Limit | None = None
    against: Literal["old", "current"] = "old"
    mean: Measured | None = None
    """Divisor of `normalize`: the mean weight, set by `prepare`."""
    needs: ClassVar[tuple[str, ...]] = ("sampler_logp",)

    def __post_init__(self) -> None:
        if self.low is not None and self.high is not None and not self.low <= self.high:
            raise ConfigError(
                f"Correction's low={self.low} is above its high={self.high}, so no weight is within; exchange them."
            )

    def __call__(self, tokens: TokenBatch) -> Tensor:
        weight = self.bounded(tokens)
        if not self.normalize:
            return weight
        return weight / (self.step_mean(tokens) if self.mean is None else self.mean)

    @property
    def is_stepwise(self) -> bool:
        return self.normalize

    def prepare(self, tokens: TokenBatch, totals: Totals) -> Correction:
        """The correction with the mean weight of the whole step, where `normalize` needs it."""
        return replace(self, mean=self.step_mean(tokens)) if self.normalize else self

    def raw(self, tokens: TokenBatch) -> Tensor:
        """[N, T] or [N, 1], `exp(e)` before bounds; a log-weight above 60 counts as 60."""
        gap = mismatch(tokens, self.against, drawn_logp(tokens))
        gap = gap if self.level == "token" else gap.sum(-1, keepdim=True)
        return gap.clamp(
            -LIMIT if self.limit is None else -self.limit, LIMIT if self.limit is None else self.limit
        ).exp()

    def bounded(self, tokens: TokenBatch) -> Tensor:
        """[N, T] or [N, 1], within the bounds, before `normalize`."""
        weight = self.raw(tokens)
        if self.low is None and self.high is None:
            return weight
        if self.mode == "truncate":
            return weight.clamp(self.low, self.high)
        low, high = (-math.inf if self.low is None else self.low), (math.inf if self.high is None else self.high)
        return torch.where((weight < low) | (weight > high), 0.0, weight)

    def step_mean(self, tokens: TokenBatch) -> float:
        """Divisor of `normalize`: the mean weight over tokens of the mask, or over sequences that have any."""
        weight = self.bounded(tokens)
        counts = tokens.mask if self.level == "token" else tokens.mask.any(-1, keepdim=True)
        return (weight * counts).sum().item() / max(int(counts.sum()), 1) or 1.0

    def metrics(self, tokens: TokenBatch) -> dict[str, Metric]:
        """TRL's `sampling/importance_sampling_ratio/{min,mean,max}`, of the weight; nothing without a sampler's numbers."""
        if tokens.sampler_logp is None:
            return {}
        weight = self(tokens)
        weight = weight[tokens.mask] if self.level == "token" else weight.squeeze(-1)
        name = "sampling/importance_sampling_ratio"
        least, most = (weight.min().item(), weight.max().item()) if weight.numel() else (math.nan, math.nan)
        return {f"{name}/min": Min(least), f"{name}/mean": Mean.of(weight), f"{name}/max": Max(most)}


Statistic = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k1", "seq_max_k2", "seq_max_k3",
]  # fmt: skip


@checked_dataclass(frozen=True)
class Rejection:
    """1 where sampler and learner agree well enough, else 0: a whole sequence, or single tokens. verl's `rollout_rs`.

    `k1 = -e` (sampler over learner), `k2 = e^2 / 2`, `k3 = exp(e) - 1 - e`, with e clipped to +-20; the sequence forms take the
    sum, mean or largest value over the tokens that count. k2 and k3 keep values up to `high`; k1 keeps
    `log low <= k1 <= log high`, with `low` None being `1 / high`.
    """

    statistic: Statistic = "seq_mean_k3"
    high: Bound = 0.01
    low: Bound | None = None
    against: Literal["old", "current"] = "old"
    needs: ClassVar[tuple[str, ...]] = ("sampler_logp",)

    def __call__(self, tokens: TokenBatch) -> Tensor:
        return self.keep(tokens).to(tokens.logp.dtype)

    def keep(self, tokens: TokenBatch) -> Tensor:
        """[N, T] bool, tokens that count and agree."""
        value = self._value(tokens)
        if self.statistic.endswith("k1"):
            low = 1.0 / self.high if self.low is None else self.low
            agrees = (value >= math.log(low)) & (value <= math.log(self.high))
        else:
            agrees = value <= self.high
        return tokens.mask & agrees

    def metrics(self, tokens: TokenBatch) -> dict[str, Metric]:
        """`sampling/rejected_ratio`: tokens that were left out; `sampling/rejected_sequence_ratio`: rows that lost any."""
        lost = tokens.mask & ~self.keep(tokens)
        return {
            "sampling/rejected_ratio": Mean.of(lost, tokens.mask),
            "sampling/rejected_sequence_ratio": Mean.of(lost.any(-1)),
        }

    def _value(self, tokens: TokenBatch) -> Tensor:
        """[N, T] or [N, 1]"""
        level, _, estimator = self.statistic.rpartition("_")
        gap = mismatch(tokens, self.against, drawn_logp(tokens)).clamp(-20.0, 20.0)
        value = {"k1": -gap, "k2": gap.square() / 2, "k3": gap.exp() - 1 - gap}[estimator]
        if level == "token":
            return value
        value = torch.where(tokens.mask, value, torch.zeros_like(value))
        if level == "seq_sum":
            return value.sum(-1, keepdim=True)
        if level == "seq_mean":
            return tokens.per_sequence(value)
        return value.masked_fill(~tokens.mask, -math.inf).amax(-1, keepdim=True)


@checked_dataclass(frozen=True)
class VACO:
    """0 for tokens of a completion whose mean `abs(exp(e) - 1)` is above `high`, where the advantage pushes `e` further; else 1.

    The mean estimates the total variation between learner and sampler. "VACO", 2026, <https://arxiv.org/abs/2603.01365>, as
    Open-Instruct's `rho_mask_tv_divergence`; `Correction("token", "truncate")` in the same term is its importance weight.
    """

    high: Limit = 2.0
    needs: ClassVar[tuple[str, ...]] = ("sampler_logp",)

    def __call__(self, tokens: TokenBatch) -> Tensor:
        return torch.where(self._is_outside(tokens), 0.0, torch.ones_like(tokens.old_logp))

    def metrics(self, tokens: TokenBatch) -> dict[str, Tensor]:
        """`vaco/masked`: share of tokens left out."""
        return {"vaco/masked": self._is_outside(tokens).float()}

    def _is_outside(self, tokens: TokenBatch) -> Tensor:
        gap = mismatch(tokens, drawn=drawn_logp(tokens)).clamp(-10.0, 10.0)
        is_far = tokens.per_sequence((gap.exp() - 1.0).abs()) > self.high
        return is_far & (gap.sign() * tokens.advantages > 0)


@checked_dataclass(frozen=True)
class OffPolicyMask:
    """0 for sequences of negative advantage that the policy has drifted away from, else 1. DeepSeek-V3.2, 2025.

    Drift is the mean over the tokens that count of `sampler_logp - logp`, or of `old_logp - logp` without a sampler's numbers.
    """

    threshold: Limit = 0.5

    def __call__(self, tokens: TokenBatch) -> Tensor:
        drift = tokens.per_sequence((drawn_logp(tokens) - tokens.logp.detach()).nan_to_num(0.0))  # [N, 1]
        return ((tokens.advantages >= 0) | (drift <= self.threshold)).to(tokens.logp.dtype)

    def metrics(self, tokens: TokenBatch) -> dict[str, Tensor | Metric]:
        """`off_policy_mask_ratio`: sequences left out."""
        return {"off_policy_mask_ratio": 1.0 - self(tokens).amin(-1, keepdim=True)}


@checked_dataclass(frozen=True)
class MemberWeight:
    """Filtered, truncated importance weight: `min(pi / mu, high)` a token, 0 for tokens that the filter removes.

    `pi` is the policy at the rollout, `mu` the member that drew the token. The filter takes out completions of negative advantage
    that the policy would hardly write: pushing them down further teaches nothing and spoils the distribution. That is where the
    mean of `log mu - log pi` over the tokens that count is above `drift` (nats a token; None: no filter). F-TIS, 2026,
    <https://arxiv.org/abs/2605.22537>.
    """

    high: Limit = 2.0
    drift: Bound | None = 0.5

    def __call__(self, policy_logp: Tensor, member_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        """[N, T] from log-probabilities [N, T], `mask` [N, T] bool and `advantages` [N, 1] or [N, T]; 0 off the mask."""
        gap = torch.where(mask, policy_logp - member_logp, torch.zeros_like(policy_logp)).detach()
        weight = gap.clamp(-60.0, 60.0).exp().clamp(max=self.high)
        if self.drift is not None:
            lengths = mask.sum(-1, keepdim=True).clamp(min=1)
            is_far = -gap.sum(-1, keepdim=True) / lengths > self.drift  # [N, 1]
            weight = torch.where(is_far & (advantages < 0), 0.0, weight)
        return torch.where(mask, weight, torch.zeros_like(weight))
