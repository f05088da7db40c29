"""Metrics of a step's completions other than rewards: diversity, repetition, format, length by right and wrong."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covey.rewards.scales import Scale, seen_scales, verdicts
from covey.types import Group, Last, Mean, Metric

_MIX = np.uint64(0x9E3779B97F4A7C15)
_REPEATED = 4
"""Length of the n-grams whose return counts as repetition."""


def text_metrics(
    groups: Sequence[Group], names: Sequence[str], weights: Tensor, scales: Sequence[Scale | None] | None = None
) -> dict[str, Metric]:
    """Metrics of scored groups, whose rewards have `names` [R], `weights` [R] and `scales` [R] (None: as the groups show them).

    `diversity/*`, `completions/repetition`, `completions/mean_length_{right,wrong}`, `format_rate`, and counts of prompts
    and completions. Right and wrong by the rewards whose scale is known (`verdicts`); without any those two do not exist, and
    each is NaN where no completion is so. `format_rate`: the mean of the first reward whose name says format; without one there is none.
    """
    ids = [[completion.token_ids.cpu().numpy() for completion in group.completions] for group in groups]
    reward_scales = seen_scales(groups, len(names)) if scales is None else scales
    metrics = {**_diversity(ids), **_lengths(groups, weights, reward_scales)}
    metrics["num_prompts"] = Last(float(len(groups)))
    metrics["completions/count"] = Last(float(sum(group.size for group in groups)))
    metrics["prompts/mean_length"] = Mean(sum(len(group.prompt.token_ids) for group in groups), len(groups))
    column = next((r for r, name in enumerate(names) if "format" in name), None)
    if column is not None:
        scores = torch.cat([group.recorded[:, column] for group in groups if group.recorded is not None])
        metrics["format_rate"] = Mean.of(scores, ~scores.isnan())
    return metrics


def _diversity(ids: Sequence[Sequence[NDArray[np.int64]]]) -> dict[str, Metric]:
    """Of completions [P][G][T_i], by group: distinct completions, distinct n-grams (Li et al. 2016), and n-grams that return."""
    rows = [row for group in ids for row in group]
    of_group = np.repeat(np.arange(len(ids)), [len(group) for group in ids])
    unique = [len({row.tobytes() for row in group}) / max(len(group), 1) for group in ids]
    metrics: dict[str, Metric] = {"diversity/unique": Mean(sum(unique), len(unique))}
    grams = _Grams(rows)
    for n in (1, 2):
        shares = grams.distinct(n, of_group, len(ids))
        metrics[f"diversity/distinct_{n}"] = Mean(float(shares.sum()), len(shares))
    again = 1.0 - grams.distinct(_REPEATED, np.arange(len(rows)), len(rows))
    return {**metrics, "completions/repetition": Mean(float(again.sum()), len(again))}


class _Grams:
    """The n-grams of completions [N][T_i], all at once: a step has hundreds of completions, mostly short ones."""

    def __init__(self, rows: Sequence[NDArray[np.int64]]) -> None:
        self._tokens = np.concatenate(rows).astype(np.uint64) if rows else np.zeros(0, dtype=np.uint64)
        self._row = np.repeat(np.arange(len(rows)), [len(row) for row in rows])

    def distinct(self, n: int, places: NDArray[np.int64], count: int) -> NDArray[np.float64]:
        """[<= count], for each of `count` places the share of its n-grams that are left once each is counted once.

        `places` [N]: which place a completion belongs to. A place without n-grams is left out. An n-gram is a number of 64
        bits less those that its place takes; two that differ share one about once in 2^50 pairs.
        """
        size = len(self._tokens) - n + 1
        if size <= 0:
            return np.zeros(0)
        code = np.zeros(size, dtype=np.uint64)
        for i in range(n):
            code = (code + self._tokens[i : i + size] + np.uint64(1)) * _MIX
        is_inside = self._row[:size] == self._row[n - 1 :]
        place = places[self._row[:size][is_inside]]
        bits = max(count - 1, 1).bit_length()
        ordered = np.sort(place.astype(np.uint64) << np.uint64(64 - bits) | code[is_inside] >> np.uint64(bits))
        is_new = np.ones(len(ordered), dtype=bool)
        is_new[1:] = ordered[1:] != ordered[:-1]
        all_of = np.bincount(place, minlength=count)
        new_of = np.bincount((ordered[is_new] >> np.uint64(64 - bits)).astype(np.int64), minlength=count)
        return new_of[all_of > 0] / all_of[all_of > 0]


def _lengths(groups: Sequence[Group], weights: Tensor, scales: Sequence[Scale | None]) -> dict[str, Metric]:
    scored = [group for group in groups if group.rewards is not None]
    if not scored:
        return {}
    rewards = torch.cat([group.rewards for group in scored if group.rewards is not None])  # [N, R]
    lengths = torch.tensor([float(c.written.sum()) for group in scored for c in group.completions])  # [N]
    right_wrong = verdicts(rewards, weights, scales)
    if right_wrong is None:
        return {}
    return {
        "completions/mean_length_right": Mean.of(lengths, right_wrong[0]),
        "completions/mean_length_wrong": Mean.of(lengths, right_wrong[1]),
    }
