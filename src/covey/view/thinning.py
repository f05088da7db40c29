"""A long curve in few points, the same ones at every reload: the lowest and the highest of each bucket of steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Curve:
    """What is drawn of a series."""

    steps: np.ndarray
    """[k]"""
    values: np.ndarray
    """[k], NaN where the metric was not finite: a gap."""
    hidden: int
    """Points of the range that are not drawn."""
    not_finite: int
    """Values of the range that were NaN or infinite."""


def thin(steps: np.ndarray, values: np.ndarray, points: int) -> Curve:
    """At most about `points` of `steps` [n] (in order) and `values` [n] (`inf`: not finite).

    Buckets are powers of two of steps wide and start at multiples of it, so a reload or a shifted window draws the same points.
    """
    bad = ~np.isfinite(values)
    if len(steps) <= points:
        return Curve(steps, np.where(bad, np.nan, values), 0, int(bad.sum()))
    span = float(steps[-1] - steps[0]) + 1
    width = 1
    while span / width > points / 2:
        width *= 2
    starts = np.flatnonzero(np.diff(steps // width, prepend=-1))
    ends = np.append(starts[1:], len(steps))
    kept = [_kept_of(values, bad, start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    chosen = np.concatenate(kept)
    drawn = np.where(bad[chosen], np.nan, values[chosen])
    return Curve(steps[chosen], drawn, len(steps) - len(chosen), int(bad.sum()))


def _kept_of(values: np.ndarray, bad: np.ndarray, start: int, end: int) -> np.ndarray:
    part = values[start:end]
    is_bad = bad[start:end]
    if not is_bad.any():
        return start + np.unique([part.argmin(), part.argmax()])
    kept = [int(is_bad.argmax())]
    if not is_bad.all():
        kept += [int(part.argmin()), int(np.where(is_bad, -np.inf, part).argmax())]
    return start + np.unique(kept)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of the last `window` finite values at each place [n]; places that are not finite stay so."""
    if window <= 1:
        return values
    finite = np.isfinite(values)
    sums = np.cumsum(np.where(finite, values, 0.0))
    counts = np.cumsum(finite)
    sums[window:] -= sums[:-window].copy()
    counts[window:] -= counts[:-window].copy()
    return np.where(finite, sums / np.maximum(counts, 1), values)
