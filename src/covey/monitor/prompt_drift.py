"""Drift of the prompts since the start of the run, measured on counts of their tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.types import Group, Mean, Metric

_BUCKETS = 256
_BASELINE = 10
"""First steps, whose prompts are the baseline."""


class PromptDrift:
    """`prompts/drift`: Jensen-Shannon divergence (nats, at most log 2) of a step's prompt tokens from the first ten steps'."""

    def __init__(self) -> None:
        self._baseline = np.zeros(_BUCKETS)
        self._steps = 0

    def __call__(self, groups: Sequence[Group]) -> dict[str, Metric]:
        """Nothing while the first steps are still being counted."""
        ids = np.concatenate([np.asarray(group.prompt.token_ids, dtype=np.int64) for group in groups])
        counts = np.bincount(ids % _BUCKETS, minlength=_BUCKETS).astype(float)
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
