"""Probabilities against what happened: area under the ROC curve with its interval, calibration error, Brier score."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from covey.evaluation.intervals import Estimate, wilson

_BINS = 10


@dataclass(frozen=True)
class Bin:
    """Predictions of about the same probability: their mean, the share that came true, their number."""

    predicted: float
    observed: float
    count: int


@dataclass(frozen=True)
class Calibration:
    """Quality of predicted probabilities."""

    auc: Estimate
    """Probability that a true case is given more than a false one; `count` is that of the clusters."""
    error: float
    """Expected calibration error: mean distance of predicted and observed shares, over bins of equal size. Naeini et al. 2015."""
    brier: float
    """Mean squared error of the probabilities; 0.25 is a coin's."""
    bins: tuple[Bin, ...]
    count: int


def calibration(scores: Sequence[float], labels: Sequence[bool], clusters: Sequence[Hashable]) -> Calibration:
    """Judge probabilities [N] by what came true [N]. Cases of one cluster (the steps of a completion) depend on each other."""
    p, y = np.asarray(scores, dtype=np.float64), np.asarray(labels, dtype=bool)
    parts = [part for part in np.array_split(np.argsort(p, kind="stable"), min(_BINS, len(p))) if len(part)]
    bins = tuple(Bin(float(p[part].mean()), float(y[part].mean()), len(part)) for part in parts)
    error = sum(bucket.count * abs(bucket.predicted - bucket.observed) for bucket in bins) / max(1, len(p))
    return Calibration(auc(scores, labels, clusters), error, float(((p - y) ** 2).mean()), bins, len(p))


def auc(scores: Sequence[float], labels: Sequence[bool], clusters: Sequence[Hashable]) -> Estimate:
    """Area under the ROC curve, ties counted half, with a 95% interval for clustered cases. NaN where all labels are equal.

    The variance is Obuchowski's (1997, Biometrics 53, eq. 5 to 8), which is DeLong's with every case alone; the interval is Wilson's
    for as many trials as that variance is worth, so that it stays in [0, 1]. Where nothing varied, the trials are the clusters of the
    rarer label.
    """
    p, y = np.asarray(scores, dtype=np.float64), np.asarray(labels, dtype=bool)
    names = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    places = np.asarray([names[name] for name in clusters])
    right, wrong = p[y], p[~y]
    if not len(right) or not len(wrong):
        return Estimate(math.nan, 0.0, 1.0, len(names))
    of_right, of_wrong = _above(right, wrong), 1 - _above(wrong, right)
    value = float(of_right.mean())
    sums = [
        np.bincount(places[held], weights=part - value, minlength=len(names))
        for held, part in ((y, of_right), (~y, of_wrong))
    ]
    has = [int((np.bincount(places[held], minlength=len(names)) > 0).sum()) for held in (y, ~y)]
    fair = [count / max(1, count - 1) for count in (*has, len(names))]
    variance = (
        fair[0] * float((sums[0] ** 2).sum()) / len(right) ** 2
        + fair[1] * float((sums[1] ** 2).sum()) / len(wrong) ** 2
        + 2 * fair[2] * float((sums[0] * sums[1]).sum()) / (len(right) * len(wrong))
    )
    trials = value * (1 - value) / variance if variance > 0 and 0 < value < 1 else min(has)
    low, high = wilson(value, trials)
    return Estimate(value, low, high, len(names))


def _above(some: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """Share of `others` below each of `some`, ties counted half."""
    ordered = np.sort(others)
    return (np.searchsorted(ordered, some, "left") + np.searchsorted(ordered, some, "right")) / (2 * len(others))
