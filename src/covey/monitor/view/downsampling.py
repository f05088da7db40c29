"""A long curve in few points, the same ones at every reload: the lowest and the highest of each bucket of steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Curve:
    """Downsampled series."""

    steps: np.ndarray
    """[k]"""
    values: np.ndarray
    """[k], NaN where the metric was not finite: a gap."""
    hidden: int
    """Points of the range that are not drawn."""
    not_finite: int
    """Values of the range that were NaN or infinite."""
    places: np.ndarray
    """[k], indices into the full series."""


def thin(steps: np.ndarray, values: np.ndarray, points: int) -> Curve:
    """At most about `points` of `steps` [n] (in order) and `values` [n] (`inf`: not finite).

    Buckets are powers of two of steps wide and start at multiples of it, so a reload or a shifted window draws the same points.
    """
    bad = ~np.isfinite(values)
    if len(steps) <= points:
        return Curve(steps, np.where(bad, np.nan, values), 0, int(bad.sum()), np.arange(len(steps)))
    span = float(steps[-1] - steps[0]) + 1
    width = 1
    while span / width > points / 2:
        width *= 2
    starts = np.flatnonzero(np.diff(steps // width, prepend=-1))
    chosen = [
        _first_where(
            values == _each(np.minimum, values, starts), starts
        ),  # `inf` stands for values that are not finite
        _first_where(values == _each(np.maximum, np.where(bad, -np.inf, values), starts), starts),
        _first_where(bad, starts),
    ]
    places = np.unique(np.concatenate(chosen))
    values = np.where(bad[places], np.nan, values[places])
    return Curve(steps[places], values, len(steps) - len(places), int(bad.sum()), places)


def _each(of: np.ufunc, values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """For each place [n], `of` its bucket."""
    return np.repeat(of.reduceat(values, starts), np.diff(np.append(starts, len(values))))


def _first_where(holds: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The first place of each bucket where `holds` [n] is True; nothing for a bucket without one."""
    places = np.flatnonzero(holds)
    buckets = np.searchsorted(starts, places, side="right")
    return places[np.flatnonzero(np.diff(buckets, prepend=-1))]


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
