"""Advantages by the values of a column: a baseline by group, a scale by slice, so that no language or task sets another's scale."""

from dataclasses import dataclass

from torch import Tensor

from covey.algorithms.advantages import centred, nan_std, sequence_rewards
from covey.types import Scores


@dataclass(frozen=True)
class SliceNormalized:
    """`(R - mean of the group) / (sd of the slice + epsilon)`: the slice is all completions whose prompts share a value of `column`.

    With one slice it is `GroupNormalized("batch")` (Liu et al. 2025, "Tricks or Traps"). Slices of fewer than `min_slice` scored
    completions are pooled, for a deviation of few numbers is mostly chance; where the pool is that small too, all completions
    give the scale. Raises ValueError where the scores do not say which slice a prompt is in.
    """

    column: str
    min_slice: int = 16
    epsilon: float = 1e-4

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
