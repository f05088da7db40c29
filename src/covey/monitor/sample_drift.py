"""Drift of prompts from those of the start, and of rewards below those just before: token counts, and two-sample tests of blocks."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covey.rewards.metrics import totals_of
from covey.types import Group, Last, Mean, Metric

_PERMUTATIONS, _MORE = 300, 10_000
"""Permutations of a look, and of one whose p is below `_SMALL`: the tail of a gamma fitted to 300 is too uncertain there."""
_SMALL = 1e-3

Floats = NDArray[np.float64]


def kolmogorov_smirnov(before: Floats, after: Floats) -> float:
    """p of the two-sided Kolmogorov-Smirnov test by its limit distribution, `2 sum (-1)^(k-1) exp(-2 k^2 D^2 nm / (n + m))`.

    Ties make it larger, never smaller. Smirnov 1948.
    """
    scaled = _gap(before, after, both=True) * math.sqrt(_size(before, after))
    if scaled < 0.2:
        return 1.0
    tail = sum((-1) ** (k - 1) * math.exp(-2 * k * k * scaled * scaled) for k in range(1, 101))
    return float(min(1.0, max(0.0, 2 * tail)))


def has_fallen(before: Floats, after: Floats) -> float:
    """p of the one-sided test: small when `after` lies lower. `exp(-2 D^2 nm / (n + m))`."""
    gap = _gap(before, after, both=False)
    return min(1.0, math.exp(-2 * gap * gap * _size(before, after)))


def _gap(before: Floats, after: Floats, *, both: bool) -> float:
    """Largest distance of the distribution functions; one-sided, of `after`'s above that of `before`."""
    points = np.concatenate([before, after])
    share = lambda x: np.searchsorted(np.sort(x), points, side="right") / len(x)
    gaps = share(after) - share(before)
    return float(np.abs(gaps).max() if both else max(0.0, gaps.max()))


def _size(before: Floats, after: Floats) -> float:
    return len(before) * len(after) / (len(before) + len(after))


def maximum_mean_discrepancy(before: Floats, after: Floats, *, seed: int = 0) -> float:
    """p of the kernel two-sample test (Gretton et al. 2012, JMLR 13) on rows of features [n, F] and [m, F].

    Kernel: the product of rows of length 1. The null distribution is a gamma with the mean, deviation and skewness of 300
    permutations (as that of Székely and Rizzo's statistics is approximated, Josse et al. 2008), so that p below 1/300 means something; of
    10,000 where it is below 0.001.
    """
    rows = np.concatenate([before, after])
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    kernel = rows @ rows.T
    signs = np.concatenate([np.full(len(before), 1 / len(before)), np.full(len(after), -1 / len(after))])
    p = _tail(kernel, signs, _PERMUTATIONS, seed)
    return p if p >= _SMALL else _tail(kernel, signs, _MORE, seed)


def _tail(kernel: Floats, signs: Floats, permutations: int, seed: int) -> float:
    """p of the statistic under the gamma that is fitted to its value over random permutations of `signs`."""
    draw = np.random.default_rng(seed)
    shuffled = np.stack([draw.permutation(signs) for _ in range(permutations)])
    null = np.einsum("pi,pi->p", shuffled @ kernel, shuffled)
    observed = float(signs @ kernel @ signs)
    deviation = float(null.std())
    if deviation < 1e-12 * max(1.0, abs(float(null.mean()))):
        return 1.0
    z = (observed - float(null.mean())) / deviation
    skew = max(float((((null - null.mean()) / deviation) ** 3).mean()), 0.05)
    shape = 4 / skew**2
    return gamma_tail(shape, shape + z * math.sqrt(shape)) if z > -math.sqrt(shape) else 1.0


def gamma_tail(shape: float, x: float) -> float:
    """Q(shape, x), the share of a gamma distribution of scale 1 above x.

    >>> round(gamma_tail(1.0, 2.0), 6)  # exp(-2)
    0.135335
    """
    return float(torch.special.gammaincc(*torch.tensor([shape, max(x, 0.0)], dtype=torch.float64)))


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
        self._first, self._before, self._block = (list(map(list, state[n])) for n in ("first", "before", "block"))
        self._steps, self._looks, self._weights = int(state["steps"]), int(state["looks"]), list(state["weights"])


def _row(group: Group, weights: Tensor) -> list[float]:
    """Length, counts of hashed pairs of tokens [64], mean reward (NaN where unscored)."""
    ids = np.asarray(group.prompt.token_ids, dtype=np.int64)
    pairs = ids[:-1] * 31 + ids[1:] if len(ids) > 1 else ids
    counts = np.bincount((pairs * _MIX >> 7) % _BUCKETS, minlength=_BUCKETS)
    return [float(len(ids)), *counts.astype(float).tolist(), float(totals_of(group, weights).nanmean())]


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
