"""Advantages, one number a completion: how much better than its siblings. They take `Scores` and return `[P, G]`.

An unscored completion (NaN) gets 0 and moves no statistic of its siblings. A group whose rewards are all equal, to the
last bits of their type, gets exactly 0 from every estimator that compares within the group. `R` is the reward of a
completion: the weighted sum of its functions, plus rewards of single tokens, minus a KL in the reward.
"""

from typing import Literal

import torch
from torch import Tensor

from covey.declared import NotNegative, checked_dataclass
from covey.types import Scores

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


@checked_dataclass(frozen=True)
class GroupNormalized:
    """`(R - mean) / (sd + epsilon)` within the group. GRPO, Shao et al. 2024, section 4.1.2.

    `scale="batch"` divides by the deviation over all completions instead (Liu et al. 2025, "Tricks or Traps"), `"none"` does not
    divide (Dr. GRPO, Liu et al. 2025). `epsilon` is 1e-4 in TRL, 1e-6 in verl. A group of one by `singleton`: 0, or
    `R / (1 + epsilon)`. `variance_floor` bounds the variance from below too (verl's vectorized
    form).
    """

    scale: Literal["group", "batch", "none"] = "group"
    epsilon: NotNegative = 1e-4
    singleton: Singleton = "zero"
    variance_floor: NotNegative | None = None

    def __call__(self, scores: Scores) -> Tensor:
        rewards = sequence_rewards(scores)
        apart = centred(rewards, self.singleton)
        if self.scale == "none":
            return apart.nan_to_num(0.0)
        compared = rewards if self.scale == "group" else rewards.reshape(1, -1)
        spread = nan_std(compared).masked_fill(_count(compared) == 1, 1.0)  # verl's unit for a group of one
        if self.variance_floor is not None:
            spread = spread.square().clamp(min=self.variance_floor).sqrt()
        return (apart / (spread + self.epsilon)).nan_to_num(0.0)
