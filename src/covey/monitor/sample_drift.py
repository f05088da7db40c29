"""Drift of prompts from those of the start, and of rewards below those just before: token counts, and two-sample tests of blocks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from covey.monitor.measures import total_of
from covey.monitor.two_sample import has_fallen, kolmogorov_smirnov, maximum_mean_discrepancy
from covey.types import Group, Last, Mean, Metric

_STEPS, _PROMPTS, _MOST = 10, 64, 256
"""A block has at least so many steps and prompts; of more prompts only the first of each step are kept."""
_BUCKETS = 64
_MIX = 0x9E3779B1
_TESTS = 3


class SampleDrift:
    """`prompts/drift_p/length`, `prompts/drift_p/text` and `rewards/drift_p`, at the end of each block of steps.

    Lengths of prompts (Kolmogorov-Smirnov) and their hashed pairs of tokens (kernel two-sample test) against the first block;
    mean rewards of prompts against the block before, one-sided: rewards that rise are learning. Each is a p-value corrected
    for three tests and for all looks so far, `3 k (k + 1) p` at look k, whose sum of levels is that of one test.
    """

    def __init__(self) -> None:
        self._first: list[list[float]] = []
        self._before: list[list[float]] = []
        self._block: list[list[float]] = []
        self._steps, self._looks = 0, 0
        self._weights: list[float] = []

    def __call__(self, groups: Sequence[Group], weights: Tensor) -> dict[str, Metric]:
        """Nothing in the middle of a block."""
        if weights.tolist() != self._weights:  # other weights make other rewards
            self._before, self._weights = [], weights.tolist()
            self._block = [[*row[:-1], float("nan")] for row in self._block]
        self._block += [_row(group, weights) for group in groups[: -(-_MOST // _STEPS)]]
        self._steps += 1
        if self._steps < _STEPS or len(self._block) < _PROMPTS:
            return {}
        block, self._block, self._steps = self._block, [], 0
        if not self._first:
            self._first = self._before = block
            return {}
        self._looks += 1
        p_values = self._tested(np.asarray(block))
        self._before = block
        level = _TESTS * self._looks * (self._looks + 1)
        return {name: Last(min(1.0, level * p)) for name, p in p_values.items()}

    def _tested(self, now: NDArray[np.float64]) -> dict[str, float]:
        first = np.asarray(self._first)
        p_values = {
            "prompts/drift_p/length": kolmogorov_smirnov(first[:, 0], now[:, 0]),
            "prompts/drift_p/text": maximum_mean_discrepancy(first[:, 1:-1], now[:, 1:-1], seed=self._looks),
        }
        before, after = (rows[~np.isnan(rows)] for rows in (np.asarray(self._before or [[np.nan]])[:, -1], now[:, -1]))
        if min(len(before), len(after)) >= _PROMPTS // 2:
            p_values["rewards/drift_p"] = has_fallen(before, after)
        return p_values

    def state_dict(self) -> dict[str, Any]:
        rows = {name: [list(row) for row in getattr(self, f"_{name}")] for name in ("first", "before", "block")}
        return {**rows, "steps": self._steps, "looks": self._looks, "weights": list(self._weights)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:
            return
        self._first, self._before, self._block = (list(map(list, state[n])) for n in ("first", "before", "block"))
        self._steps, self._looks, self._weights = int(state["steps"]), int(state["looks"]), list(state["weights"])


def _row(group: Group, weights: Tensor) -> list[float]:
    """Length, counts of hashed pairs of tokens [64], mean reward (NaN where unscored)."""
    ids = np.asarray(group.prompt.token_ids, dtype=np.int64)
    pairs = ids[:-1] * 31 + ids[1:] if len(ids) > 1 else ids
    counts = np.bincount((pairs * _MIX >> 7) % _BUCKETS, minlength=_BUCKETS)
    return [float(len(ids)), *counts.astype(float).tolist(), float(total_of(group, weights).nanmean())]


_PROMPT_BUCKETS = 256
_BASELINE = 10
"""First steps, whose prompts are the baseline."""


class PromptDrift:
    """`prompts/drift`: Jensen-Shannon divergence (nats, at most log 2) of a step's prompt tokens from the first ten steps'."""

    def __init__(self) -> None:
        self._baseline = np.zeros(_PROMPT_BUCKETS)
        self._steps = 0

    def __call__(self, groups: Sequence[Group]) -> dict[str, Metric]:
        """Nothing while the first steps are still being counted."""
        ids = np.concatenate([np.asarray(group.prompt.token_ids, dtype=np.int64) for group in groups])
        counts = np.bincount(ids % _PROMPT_BUCKETS, minlength=_PROMPT_BUCKETS).astype(float)
        if not counts.sum():
            return {}
        if self._steps < _BASELINE:
            self._baseline += counts
            self._steps += 1
            return {}
        return {"prompts/drift": Mean(divergence(self._baseline, counts), 1)}

    def state_dict(self) -> dict[str, Any]:
        return {"baseline": self._baseline.tolist(), "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._baseline, self._steps = np.asarray(state["baseline"], dtype=float), int(state["steps"])


def divergence(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """Jensen-Shannon divergence of two histograms, in nats. Example: equal ones 0, disjoint ones log 2."""
    p, q = left / left.sum(), right / right.sum()
    middle = (p + q) / 2
    distance = lambda x: float(np.sum(x[x > 0] * np.log(x[x > 0] / middle[x > 0])))
    return (distance(p) + distance(q)) / 2
