"""What the completions of a step say beside their rewards: diversity, repetition, form, length by right and wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covey.types import Group, Last, Mean, Metric

_MIX = np.uint64(0x9E3779B97F4A7C15)
_REPEATED = 4
"""Length of the n-grams whose return counts as repetition."""


def text_metrics(groups: Sequence[Group], names: Sequence[str], weights: Tensor) -> dict[str, Metric]:
    """Metrics of scored groups, whose rewards have `names` [R] and `weights` [R].

    `diversity/*`, `completions/repetition`, `completions/mean_length_{right,wrong}`, `format_rate`, and counts of prompts
    and completions. Right: full marks, the sum of the positive weights. Wrong: 0 or below. Neither exists where no
    completion is so. `format_rate`: the mean of the first reward whose name says format; without one there is none.
    """
    ids = [[completion.token_ids.cpu().numpy() for completion in group.completions] for group in groups]
    found = {**_diversity(ids), **_lengths(groups, weights)}
    found["num_prompts"] = Last(float(len(groups)))
    found["completions/count"] = Last(float(sum(group.size for group in groups)))
    found["prompts/mean_length"] = Mean(sum(len(group.prompt.token_ids) for group in groups), len(groups))
    column = next((r for r, name in enumerate(names) if "format" in name), None)
    if column is not None:
        scores = torch.cat([group.rewards[:, column] for group in groups if group.rewards is not None])
        found["format_rate"] = Mean.of(scores, ~scores.isnan())
    return found


def total_of(group: Group, weights: Tensor) -> Tensor:
    """[G], the weighted sum of a group's rewards, an unscored one counting 0; NaN where none scored."""
    if group.rewards is None:
        return torch.full((group.size,), torch.nan)
    total = (group.rewards.nan_to_num(0.0) * weights).sum(-1)
    return total.masked_fill(group.rewards.isnan().all(-1), torch.nan)


def _diversity(ids: Sequence[Sequence[NDArray[np.int64]]]) -> dict[str, Metric]:
    """Of completions [P][G][T_i], by group: distinct completions, distinct n-grams (Li et al. 2016), and n-grams that return."""
    unique = [len({row.tobytes() for row in group}) / max(len(group), 1) for group in ids]
    metrics: dict[str, Metric] = {"diversity/unique": Mean(sum(unique), len(unique))}
    for n in (1, 2):
        shares = [_distinct(np.concatenate([_grams(row, n) for row in group])) for group in ids]
        known = [share for share in shares if share is not None]
        metrics[f"diversity/distinct_{n}"] = Mean(sum(known), len(known))
    fresh = [_distinct(_grams(row, _REPEATED)) for group in ids for row in group]
    again = [1.0 - share for share in fresh if share is not None]
    return {**metrics, "completions/repetition": Mean(sum(again), len(again))}


def _grams(row: NDArray[np.int64], n: int) -> NDArray[np.uint64]:
    """[T - n + 1], one number for each n-gram; equal n-grams have equal numbers."""
    count = len(row) - n + 1
    if count <= 0:
        return np.zeros(0, dtype=np.uint64)
    code = np.zeros(count, dtype=np.uint64)
    for i in range(n):
        code = code * _MIX + row[i : i + count].astype(np.uint64) + np.uint64(1)
    return code


def _distinct(codes: NDArray[np.uint64]) -> float | None:
    """Share of the codes that are left once each is counted once; None of none. By sorting, ten times as fast as by hashing."""
    if not len(codes):
        return None
    ordered = np.sort(codes)
    return (1 + int(np.count_nonzero(ordered[1:] != ordered[:-1]))) / len(codes)


def _lengths(groups: Sequence[Group], weights: Tensor) -> dict[str, Metric]:
    totals = torch.cat([total_of(group, weights) for group in groups])  # [N]
    lengths = torch.tensor([float(c.num_tokens) for group in groups for c in group.completions])  # [N]
    full_marks = float(weights.clamp(min=0).sum())
    right = (totals >= full_marks - 1e-6) & (full_marks > 0)
    return {
        "completions/mean_length_right": Mean.of(lengths, right),
        "completions/mean_length_wrong": Mean.of(lengths, (totals <= 1e-6) & ~right),
    }
