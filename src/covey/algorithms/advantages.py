"""Advantages, one number a completion: how much better than its siblings. They take `Scores` and return `[P, G]`.

An unscored completion (NaN) gets 0 and moves no statistic of its siblings. A group whose rewards are all equal, to the
last bits of their type, gets exactly 0 from every estimator that compares within the group. `R` is the reward of a
completion: the weighted sum of its functions, plus rewards of single tokens, minus a KL in the reward.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from covey.algorithms.wrapping import Wrapping
from covey.errors import ConfigError
from covey.types import Advantage, Scores

Singleton = Literal["zero", "keep"]
"""Advantage of a group with one scored completion: 0, as TRL (nothing to compare with), or its own reward, as verl."""


def sequence_rewards(scores: Scores) -> Tensor:
    """`R` [P, G], NaN where no reward function scored."""
    total = scores.total
    if scores.per_token is not None:
        total = total + (scores.per_token * scores.mask).sum(-1)
    if scores.kl is not None:
        total = total - (scores.kl * scores.mask).sum(-1)
    return total


def nan_mean(x: Tensor) -> Tensor:
    """Mean over the last axis, NaN left out, [..., 1]; 0 where all are NaN."""
    return x.nansum(-1, keepdim=True) / _count(x).clamp(min=1)


def nan_std(x: Tensor) -> Tensor:
    """Sample standard deviation over the last axis, NaN left out, [..., 1]; 0 for fewer than two values."""
    squares = (x - nan_mean(x)).square().nansum(-1, keepdim=True)
    return (squares / (_count(x) - 1).clamp(min=1)).sqrt()


def is_tied(x: Tensor) -> Tensor:
    """[..., 1] bool, True where the values that are not NaN are equal but for rounding (4 units in the last place).

    By largest minus smallest, never by a standard deviation, which is not 0 for equal values in floating point.
    """
    unknown = x.isnan()
    most = x.masked_fill(unknown, -torch.inf).amax(-1, keepdim=True)
    least = x.masked_fill(unknown, torch.inf).amin(-1, keepdim=True)
    size = torch.maximum(most.abs(), least.abs())
    return ~(most - least > 4 * torch.finfo(x.dtype).eps * size)


def centred(x: Tensor, singleton: Singleton = "zero") -> Tensor:
    """[P, G], distance from the group's mean; exactly 0 for tied groups, NaN where unscored."""
    apart = torch.where(is_tied(x), torch.zeros_like(x), x - nan_mean(x))
    if singleton == "keep":
        apart = torch.where(_count(x) == 1, x, apart)
    return torch.where(x.isnan(), x, apart)


def _count(x: Tensor) -> Tensor:
    return (~x.isnan()).sum(-1, keepdim=True)


def _or_zero(x: Tensor) -> Tensor:
    """NaN in, 0 out."""
    return x.nan_to_num(0.0)


@dataclass(frozen=True)
class GroupNormalized:
    """`(R - mean) / (sd + epsilon)` within the group. GRPO, Shao et al. 2024, section 4.1.2.

    `scale="batch"` divides by the deviation over all completions instead (Liu et al. 2025, "Tricks or Traps"), `"none"` does not
    divide (Dr. GRPO, Liu et al. 2025). `epsilon` is 1e-4 in TRL, 1e-6 in verl. A group of one by `singleton`: 0, or
    `R / (1 + epsilon)`. `variance_floor` bounds the variance from below too (verl's vectorized
    form).
    """

    scale: Literal["group", "batch", "none"] = "group"
    epsilon: float = 1e-4
    singleton: Singleton = "zero"
    variance_floor: float | None = None

    def __call__(self, scores: Scores) -> Tensor:
        rewards = sequence_rewards(scores)
        apart = centred(rewards, self.singleton)
        if self.scale == "none":
            return _or_zero(apart)
        compared = rewards if self.scale == "group" else rewards.reshape(1, -1)
        spread = nan_std(compared).masked_fill(_count(compared) == 1, 1.0)  # verl's unit for a group of one
        if self.variance_floor is not None:
            spread = spread.square().clamp(min=self.variance_floor).sqrt()
        return _or_zero(apart / (spread + self.epsilon))


@dataclass(frozen=True)
class NormalizeThenSum:
    """Several rewards, each normalized within the group, then summed by weight, then normalized over the step.

    `z = (r - mean) / (sd + epsilon)` for each function (rewards of single tokens: their sum, of weight 1), `s = sum w z`, `A = (s - mean s) / (sd s + epsilon)` over all scored
    completions. Keeps a reward of large scale from drowning the others. A tied group ends near, not at, 0. GDPO, Liu et al. 2026,
    <https://arxiv.org/abs/2601.05242>.
    """

    epsilon: float = 1e-4
    exempt: ClassVar[tuple[str, ...]] = ("tied_groups",)

    def __call__(self, scores: Scores) -> Tensor:
        rewards, weights = scores.per_function.transpose(-1, -2), scores.weights  # [P, R, G], [R]
        if scores.per_token is not None:
            of_tokens = (scores.per_token * scores.mask).sum(-1).masked_fill(scores.total.isnan(), torch.nan)
            rewards = torch.cat([rewards, of_tokens.unsqueeze(1)], 1)
            weights = torch.cat([weights, weights.new_ones(1)])
        standard = _or_zero(centred(rewards) / (nan_std(rewards) + self.epsilon))
        total = (standard * weights.to(standard.dtype).unsqueeze(-1)).sum(1)  # [P, G]
        if scores.kl is not None:
            total = total - (scores.kl * scores.mask).sum(-1)
        total = torch.where(scores.total.isnan(), torch.full_like(total, torch.nan), total)
        everyone = total.reshape(1, -1)
        apart = torch.where(is_tied(everyone), torch.zeros_like(total), total - nan_mean(everyone))
        return _or_zero(apart / (nan_std(everyone) + self.epsilon)).masked_fill(total.isnan(), 0.0)


@dataclass(frozen=True)
class LeaveOneOut:
    """`R` minus the mean of the *other* completions: `G / (G - 1) (R - mean)`. RLOO, Ahmadian et al. 2024, eq. 7.

    `clip` bounds the rewards first, before a KL in the reward. `whiten` normalizes over the step by mean and deviation
    (+1e-4), as TRL's `normalize_advantages`; then a tied group is no longer exactly 0. A group of one by `singleton`.
    """

    clip: tuple[float, float] | None = None
    whiten: bool = False
    singleton: Singleton = "zero"

    @property
    def exempt(self) -> tuple[str, ...]:
        return ("tied_groups",) if self.whiten else ()

    def __call__(self, scores: Scores) -> Tensor:
        if self.clip is not None:
            total = scores.total.clamp(*self.clip)
            scores = replace(scores, per_function=total.unsqueeze(-1), weights=torch.ones_like(total[0, :1]))
        rewards = sequence_rewards(scores)
        count = _count(rewards)
        apart = centred(rewards, self.singleton)
        apart = torch.where(count > 1, apart * count / (count - 1).clamp(min=1), apart)
        if self.whiten:
            apart = torch.where(count > 1, apart, torch.nan)  # a lone completion moves no statistic of the others
            everyone = apart.reshape(1, -1)
            apart = (apart - nan_mean(everyone)) / (nan_std(everyone) + 1e-4)
        return _or_zero(apart)


@dataclass(frozen=True)
class PassAtK:
    """The best completion gets its lead over the second best, all others 0: `max R - second max R`. Rewards pass@k.

    `scale` divides by `sd + epsilon` of the group, as verl's `grpo_passk`. Fewer than two scored completions: 0.
    """

    scale: bool = True
    epsilon: float = 1e-6

    def __call__(self, scores: Scores) -> Tensor:
        rewards = sequence_rewards(scores)
        out = torch.zeros_like(rewards)
        if rewards.shape[-1] < 2:
            return out
        best = rewards.nan_to_num(-torch.inf).topk(2, dim=-1)
        lead = best.values[:, :1] - best.values[:, 1:]
        lead = torch.where(best.values[:, 1:].isinf() | is_tied(rewards), torch.zeros_like(lead), lead)
        if self.scale:
            lead = lead / (nan_std(rewards) + self.epsilon)
        return out.scatter(-1, best.indices[:, :1], lead)


@dataclass(frozen=True)
class OPO:
    """`R` minus the mean reward weighted by length, the optimal baseline when gradients grow with length. Hao et al. 2025.

    `R - sum(len R) / sum(len)`, len the tokens that the model wrote. A group of one by `singleton`.
    """

    singleton: Singleton = "zero"

    def __call__(self, scores: Scores) -> Tensor:
        rewards = sequence_rewards(scores)
        lengths = scores.lengths.to(rewards.dtype) * ~rewards.isnan()
        baseline = (lengths * _or_zero(rewards)).sum(-1, keepdim=True) / lengths.sum(-1, keepdim=True).clamp(min=1)
        apart = torch.where(is_tied(rewards), torch.zeros_like(rewards), rewards - baseline)
        if self.singleton == "keep":
            apart = torch.where(_count(rewards) == 1, rewards, apart)
        return _or_zero(torch.where(rewards.isnan(), rewards, apart))


@dataclass(frozen=True)
class GPG:
    """`(R - mean) x N / max(1, number of R that are not 0)`: the step is rescaled for completions that earned nothing.

    Chu et al. 2025, "GPG", as verl computes it; N counts the scored completions of the rollout. A group of one by `singleton`.
    """

    singleton: Singleton = "zero"

    def __call__(self, scores: Scores) -> Tensor:
        rewards = sequence_rewards(scores)
        scored = (~rewards.isnan()).sum()
        factor = scored / (_or_zero(rewards) != 0).sum().clamp(min=1)
        return _or_zero(centred(rewards, self.singleton) * factor)


@dataclass(frozen=True)
class MaxRL:
    """`(R - mean) / mean` within the group: hard prompts weigh more. For rewards of 0 and above; a mean of 0 or below gives 0.

    For rewards of 0 and 1 and G completions its expected gradient is that of `-sum over k < G of (1 - p)^k / k`, p the success
    rate, which goes to that of `log p`. Tajwar et al. 2026, <https://arxiv.org/abs/2602.02710>.
    """

    epsilon: float = 1e-6

    def __call__(self, scores: Scores) -> Tensor:
        rewards = sequence_rewards(scores)
        mean = nan_mean(rewards)  # below 0 it would turn right and wrong round
        return _or_zero(torch.where(mean > 0, centred(rewards) / (mean + self.epsilon), 0.0))


@dataclass(frozen=True)
class Shaped(Wrapping):
    """An advantage of shaped rewards: each of `shapes`, `scores -> [P, G]`, is added to the reward first."""

    advantage: Advantage
    shapes: tuple[Advantage, ...]

    @property
    def exempt(self) -> tuple[str, ...]:
        return (*super().exempt, "tied_groups")

    def __call__(self, scores: Scores) -> Tensor:
        return self.advantage(self.inner(scores))

    def inner(self, scores: Scores) -> Scores:
        """The scores with one more function a shape, of weight 1; unscored completions stay unscored."""
        unscored = scores.total.isnan()
        extra = [shape(scores).masked_fill(unscored, torch.nan).unsqueeze(-1) for shape in self.shapes]
        per_function = torch.cat([scores.per_function, *extra], dim=-1)
        return replace(
            scores, per_function=per_function, weights=torch.cat([scores.weights, scores.weights.new_ones(len(extra))])
        )


@dataclass(frozen=True)
class SoftOverlong:
    """A shape: 0 up to `max_length - buffer` tokens, then falling linearly to `-penalty` at `max_length` and beyond.

    DAPO's soft overlong punishment, Yu et al. 2025, eq. 13. Tokens that the model wrote count. [P, G]
    """

    max_length: int
    buffer: int
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.max_length:
            raise ConfigError(
                f"SoftOverlong's buffer={self.buffer} is the last tokens before max_length={self.max_length}; it must be above 0 and at "
                "most that (DAPO takes a fifth)."
            )

    def __call__(self, scores: Scores) -> Tensor:
        over = (scores.lengths - (self.max_length - self.buffer)).to(scores.per_function.dtype) / self.buffer
        return -self.penalty * over.clamp(0.0, 1.0)


@dataclass(frozen=True)
class LengthPenalty:
    """A shape: `-weight` for each token that the model wrote. [P, G]"""

    weight: float = 1e-3

    def __call__(self, scores: Scores) -> Tensor:
        return -self.weight * scores.lengths.to(scores.per_function.dtype)
