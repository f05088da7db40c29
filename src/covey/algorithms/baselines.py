"""Advantages of GRPO's relatives: other baselines, shaped rewards, filtered groups, scales by slice. GRPO's own is `GroupNormalized`."""

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from covey.algorithms.advantages import (
    GroupNormalized,
    Singleton,
    centred,
    is_tied,
    nan_mean,
    nan_std,
    sequence_rewards,
)
from covey.algorithms.composing import Wrapping, zeroed
from covey.declared import Count, Finite, NotNegative, Range, checked_dataclass
from covey.errors import ConfigError
from covey.types import Advantage, Scores


@checked_dataclass(frozen=True)
class SliceNormalized:
    """`(R - mean of the group) / (sd of the slice + epsilon)`: the slice is all completions whose prompts share a value of `column`.

    With one slice it is `GroupNormalized("batch")` (Liu et al. 2025, "Tricks or Traps"). Slices of fewer than `min_slice` scored
    completions are pooled, for a deviation of few numbers is mostly chance; where the pool is that small too, all completions
    give the scale. Raises ValueError where the scores do not say which slice a prompt is in.
    """

    column: str
    min_slice: Count = 16
    epsilon: NotNegative = 1e-4

    def __call__(self, scores: Scores) -> Tensor:
        rewards = sequence_rewards(scores)
        if scores.slices is None:
            raise ValueError(f"SliceNormalized needs Scores.slices, the value of {self.column!r} of each prompt.")
        spread = slice_spread(rewards, scores.slices, self.min_slice)
        return (centred(rewards) / (spread + self.epsilon)).nan_to_num(0.0)


def slice_spread(rewards: Tensor, slices: tuple[str, ...], min_slice: int) -> Tensor:
    """[P, 1], the deviation of each prompt's slice; `rewards` [P, G], NaN where unscored, `slices` [P]."""
    scored = (~rewards.isnan()).sum(-1)  # [P]
    members = {name: [p for p, slice_name in enumerate(slices) if slice_name == name] for name in dict.fromkeys(slices)}
    small = [p for rows in members.values() if int(scored[rows].sum()) < min_slice for p in rows]
    large = [rows for rows in members.values() if int(scored[rows].sum()) >= min_slice]
    spread = rewards.new_zeros(len(slices), 1)
    for rows in large:
        spread[rows] = nan_std(rewards[rows].reshape(1, -1))
    if small:
        pool = rewards[small] if int(scored[small].sum()) >= min_slice else rewards
        spread[small] = nan_std(pool.reshape(1, -1))
    return spread


def normalized_sum(rewards: Tensor, weights: Tensor, epsilon: float = 1e-4) -> Tensor:
    """[P, G], `sum w (r - mean) / (sd + epsilon)` of rewards [P, R, G], NaN counting 0; 0 in a group whose rewards cancel up to rounding, as r and 1 - r."""
    spread, weights = nan_std(rewards) + epsilon, weights.to(rewards.dtype).unsqueeze(-1)  # [P, R, 1], [R, 1]
    parts = (centred(rewards) / spread).nan_to_num(0.0) * weights
    total = parts.sum(1)
    size = lambda values: values.abs().nan_to_num(0.0).amax(-1, keepdim=True)
    rounding = 4 * torch.finfo(total.dtype).eps * (size(rewards) / spread * weights.abs()).sum(1)  # [P, 1]
    is_rounding = size(total) <= torch.minimum(rounding, 1e-3 * size(parts.abs().sum(1)))
    return total.masked_fill(is_rounding, 0.0)


def normalized_rewards(rewards: Tensor | None, weights: Tensor) -> Tensor | None:
    """[G, 1], `normalized_sum` of one group's rewards [G, R], NaN where nothing scored; None without rewards."""
    if rewards is None:
        return None
    return normalized_sum(rewards.T.unsqueeze(0), weights).T.masked_fill(
        rewards.isnan().all(-1, keepdim=True), torch.nan
    )


@checked_dataclass(frozen=True)
class NormalizeThenSum:
    """Several rewards, each normalized within the group, then summed by weight, then normalized over the step.

    `z = (r - mean) / (sd + epsilon)` for each function (rewards of single tokens: their sum, of weight 1), `s = sum w z`, `A = (s - mean s) / (sd s + epsilon)` over all scored
    completions. Keeps a reward of large scale from drowning the others. A tied group ends near, not at, 0. GDPO, Liu et al. 2026,
    <https://arxiv.org/abs/2601.05242>.
    """

    epsilon: NotNegative = 1e-4
    exempt: ClassVar[tuple[str, ...]] = ("tied_groups",)

    def __call__(self, scores: Scores) -> Tensor:
        rewards, weights = scores.per_function.transpose(-1, -2), scores.weights  # [P, R, G], [R]
        if scores.per_token is not None:
            of_tokens = (scores.per_token * scores.mask).sum(-1).masked_fill(scores.total.isnan(), torch.nan)
            rewards = torch.cat([rewards, of_tokens.unsqueeze(1)], 1)
            weights = torch.cat([weights, weights.new_ones(1)])
        total = normalized_sum(rewards, weights, self.epsilon)  # [P, G]
        if scores.kl is not None:
            total = total - (scores.kl * scores.mask).sum(-1)
        total = torch.where(scores.total.isnan(), torch.full_like(total, torch.nan), total)
        everyone = total.reshape(1, -1)
        apart = torch.where(is_tied(everyone), torch.zeros_like(total), total - nan_mean(everyone))
        return (apart / (nan_std(everyone) + self.epsilon)).nan_to_num(0.0).masked_fill(total.isnan(), 0.0)


@checked_dataclass(frozen=True)
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
        count = (~rewards.isnan()).sum(-1, keepdim=True)
        apart = centred(rewards, self.singleton)
        apart = torch.where(count > 1, apart * count / (count - 1).clamp(min=1), apart)
        if self.whiten:
            apart = torch.where(count > 1, apart, torch.nan)  # a lone completion moves no statistic of the others
            everyone = apart.reshape(1, -1)
            apart = (apart - nan_mean(everyone)) / (nan_std(everyone) + 1e-4)
        return apart.nan_to_num(0.0)


@dataclass(frozen=True)
class OPO:
    """`R` minus the mean reward weighted by length, the optimal baseline when gradients grow with length. Hao et al. 2025.

    `R - sum(len R) / sum(len)`, len the tokens that the model wrote. A group of one by `singleton`.
    """

    singleton: Singleton = "zero"

    def __call__(self, scores: Scores) -> Tensor:
        rewards = sequence_rewards(scores)
        lengths = scores.lengths.to(rewards.dtype) * ~rewards.isnan()
        baseline = (lengths * rewards.nan_to_num(0.0)).sum(-1, keepdim=True) / lengths.sum(-1, keepdim=True).clamp(
            min=1
        )
        apart = torch.where(is_tied(rewards), torch.zeros_like(rewards), rewards - baseline)
        if self.singleton == "keep":
            apart = torch.where((~rewards.isnan()).sum(-1, keepdim=True) == 1, rewards, apart)
        return torch.where(rewards.isnan(), rewards, apart).nan_to_num(0.0)


@dataclass(frozen=True)
class GPG:
    """`(R - mean) x N / max(1, number of R that are not 0)`: the step is rescaled for completions that earned nothing.

    Chu et al. 2025, "GPG", as verl computes it; N counts the scored completions of the rollout. A group of one by `singleton`.
    """

    singleton: Singleton = "zero"

    def __call__(self, scores: Scores) -> Tensor:
        rewards = sequence_rewards(scores)
        scored = (~rewards.isnan()).sum()
        factor = scored / (rewards.nan_to_num(0.0) != 0).sum().clamp(min=1)
        return (centred(rewards, self.singleton) * factor).nan_to_num(0.0)


@checked_dataclass(frozen=True)
class MaxRL:
    """`(R - mean) / mean` within the group: hard prompts weigh more. For rewards of 0 and above; a mean of 0 or below gives 0.

    For rewards of 0 and 1 and G completions its expected gradient is that of `-sum over k < G of (1 - p)^k / k`, p the success
    rate, which goes to that of `log p`. Tajwar et al. 2026, <https://arxiv.org/abs/2602.02710>.
    """

    epsilon: NotNegative = 1e-6

    def __call__(self, scores: Scores) -> Tensor:
        rewards = sequence_rewards(scores)
        mean = nan_mean(rewards)  # below 0 it would turn right and wrong round
        return torch.where(mean > 0, centred(rewards) / (mean + self.epsilon), 0.0).nan_to_num(0.0)


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


@checked_dataclass(frozen=True)
class SoftOverlong:
    """A shape: 0 up to `max_length - buffer` tokens, then falling linearly to `-penalty` at `max_length` and beyond.

    DAPO's soft overlong punishment, Yu et al. 2025, eq. 13. Tokens that the model wrote count. [P, G]
    """

    max_length: Count
    buffer: Count
    penalty: Finite = 1.0

    def __post_init__(self) -> None:
        if self.buffer > self.max_length:
            raise ConfigError(
                f"SoftOverlong's buffer={self.buffer} is the last tokens before max_length={self.max_length}; it must be at "
                "most that (DAPO takes a fifth)."
            )

    def __call__(self, scores: Scores) -> Tensor:
        over = (scores.lengths - (self.max_length - self.buffer)).to(scores.per_function.dtype) / self.buffer
        return -self.penalty * over.clamp(0.0, 1.0)


@checked_dataclass(frozen=True)
class LengthPenalty:
    """A shape: `-weight` for each token that the model wrote. [P, G]"""

    weight: Finite = 1e-3

    def __call__(self, scores: Scores) -> Tensor:
        return -self.weight * scores.lengths.to(scores.per_function.dtype)


@checked_dataclass(frozen=True)
class GroupFiltered(Wrapping):
    """An advantage within the `keep` completions of each group that rank first; the others get 0 and move no statistic.

    `by="length"` keeps the shortest, `"efficiency"` those of most reward a token. All that tie with the last one are kept. Rejected
    completions still count in the denominators, as in the paper. Shrivastava et al. 2025, section 3,
    <https://arxiv.org/abs/2508.09726>.
    """

    advantage: Advantage = field(default_factory=GroupNormalized)
    keep: Annotated[int, Range(at_least=2, why="A group to compare within takes two.")] = 2
    by: Literal["length", "efficiency"] = "length"

    @property
    def least_group(self) -> int:
        """Completions a prompt that it takes."""
        return max(self.keep, getattr(self.advantage, "least_group", 1))

    def __call__(self, scores: Scores) -> Tensor:
        return zeroed(self.advantage(self.inner(scores)), ~self.retained(scores))

    def inner(self, scores: Scores) -> Scores:
        rejected = ~self.retained(scores)
        return replace(scores, per_function=scores.per_function.masked_fill(rejected.unsqueeze(-1), torch.nan))

    def retained(self, scores: Scores) -> Tensor:
        """[P, G] bool, the completions that are trained on; never an unscored one."""
        rewards = sequence_rewards(scores)
        lengths = scores.lengths.to(rewards.dtype)
        rank = lengths if self.by == "length" else -rewards / lengths.clamp(min=1)
        rank = rank.masked_fill(rewards.isnan(), torch.inf)
        last = rank.sort(-1).values[:, min(self.keep, rank.shape[-1]) - 1].unsqueeze(-1)
        return (rank <= last) & ~rewards.isnan()
