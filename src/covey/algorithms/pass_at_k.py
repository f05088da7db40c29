"""Advantages for the best of several completions: PKPO, the gradient of max@k for any k; the lead of the best one."""

from functools import lru_cache
from math import comb
from typing import Literal

import torch
from torch import Tensor

from covey.algorithms.advantages import is_tied, nan_std, sequence_rewards
from covey.declared import Count, NotNegative, checked_dataclass
from covey.types import Scores


@checked_dataclass(frozen=True)
class PKPO:
    """`A_i = k (mean over subsets with i of their best reward - baseline)`: unbiased for max@k. Walder and Karkhanis 2025.

    Subsets have `k` of the group's n scored completions. The baseline is the best of the same subsets without i
    (`"minus_one"`, eq. 33, the one of least variance; never negative), or the mean best of the subsets of `k` that do not hold i
    (`"leave_one_out"`, which needs k < n). With `k=1` both are the mean of the others, as `LeaveOneOut`. A group with fewer than
    `k` scored completions takes all of them as its `k`. <https://arxiv.org/abs/2505.15201>
    """

    k: Count = 4
    baseline: Literal["minus_one", "leave_one_out"] = "minus_one"

    @property
    def least_group(self) -> int:
        """Completions a prompt that it takes."""
        return self.k + (self.k > 1 and self.baseline == "leave_one_out")

    def __call__(self, scores: Scores) -> Tensor:
        rewards = sequence_rewards(scores)
        rewards = torch.where(is_tied(rewards) & ~rewards.isnan(), torch.zeros_like(rewards), rewards)
        out = torch.zeros_like(rewards)
        for p, row in enumerate(rewards):
            scored = (~row.isnan()).nonzero().squeeze(-1)
            if len(scored) > 1:
                ordered, places = row[scored].sort()
                out[p, scored[places]] = self._of_sorted(ordered)
        return out

    def _of_sorted(self, ordered: Tensor) -> Tensor:
        """[n] advantages of ascending rewards [n]."""
        count = len(ordered)
        k = min(self.k, count)
        is_alone = k == 1 or (self.baseline == "leave_one_out" and k < count)
        weights = _leave_one_out(count, k) if is_alone else _minus_one(count, k)
        apart = ordered[:, None] - ordered[None, :]  # differences, so that equal rewards cancel exactly
        return (torch.tensor(weights, dtype=ordered.dtype, device=ordered.device) * apart).sum(-1)


@lru_cache
def _minus_one(count: int, k: int) -> list[list[float]]:
    """[n, n] weights of `R_i - R_j` in ascending order: how often j is the best of the others where i is the best of all."""
    whole = comb(count - 1, k - 1)
    return [[k * comb(j, k - 2) / whole if j < i else 0.0 for j in range(count)] for i in range(count)]


@lru_cache
def _leave_one_out(count: int, k: int) -> list[list[float]]:
    """[n, n] weights of `R_i - R_j`: minus the coefficient of `R_j` in `A_i`; those of a row add up to that of `R_i`."""
    inside, outside = comb(count - 1, k - 1), comb(count - 1, k)
    rows = []
    for i in range(count):
        row = []
        for j in range(count):
            if j == i:
                row.append(0.0)
                continue
            best_with = comb(j - 1, k - 2) / inside if j > i and k > 1 else 0.0  # j best of a subset that holds i
            rank = j if j < i else j - 1  # among the others
            best_without = comb(rank, k - 1) / outside
            row.append(k * (best_without - best_with))
        rows.append(row)
    return rows


@checked_dataclass(frozen=True)
class PassAtK:
    """The best completion gets its lead over the second best, all others 0: `max R - second max R`. Rewards pass@k.

    `scale` divides by `sd + epsilon` of the group, as verl's `grpo_passk`. Fewer than two scored completions: 0.
    """

    scale: bool = True
    epsilon: NotNegative = 1e-6

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
