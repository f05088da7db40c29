"""Curves of a metric: over steps, time or tokens, with the interval of held-out means, or the band of several seeds."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from covey.monitor.view.about_run import elapsed, times_of

if TYPE_CHECKING:
    from covey.monitor.view.reading import RunView

AXES = ("step", "time", "tokens")
"""Steps; hours of training since the first step; tokens of prompts and completions so far."""
_MOST_INTERVALS = 200


def curve_of(
    run: RunView, name: str, points: int, window: int, low: float | None, high: float | None, axis: str = "step"
) -> dict[str, Any]:
    """A metric between two steps in about `points` points, after a running mean over `window` values.

    `steps` and `values` [k], `x` [k] their places on the axis, `low` and `high` [k] where an interval is known.
    """
    steps, values = run.column(name)
    curve = _draw(steps, smooth(values, window), points, low, high)
    del curve["places"]
    ends = [run.held_out.interval(name, int(step)) for step in curve["steps"][:_MOST_INTERVALS]] if window == 1 else []
    if any(ends):
        ends += [None] * (len(curve["steps"]) - len(ends))
        curve["low"] = [interval and interval[0] for interval in ends]
        curve["high"] = [interval and interval[1] for interval in ends]
    return {"run": run.name, "metric": name, "x": _places(run, curve["steps"], axis), **curve}


def mean_of(
    runs: Sequence[RunView], name: str, points: int, window: int, low: float | None, high: float | None, axis: str
) -> dict[str, Any]:
    """The mean over runs at the steps that all of them have, `low` and `high` the lowest and the highest of them."""
    by_run = [(run, *run.column(name)) for run in runs]
    columns = [(run, steps, smooth(values, window)) for run, steps, values in by_run if len(steps)]
    label = f"mean of {len(columns)} seeds ({', '.join(run.name for run, *_ in columns)})"
    shared = columns[0][1] if columns else np.zeros(0)
    for _, steps, _ in columns[1:]:
        shared = np.intersect1d(shared, steps)
    rows = [values[np.searchsorted(steps, shared)] for _, steps, values in columns]
    table = np.array(rows).reshape(len(columns), len(shared))
    table = np.where(np.isfinite(table).all(axis=0), table, np.inf)  # one seed without a number: a gap
    mean = table.mean(axis=0) if len(columns) else np.zeros(0)
    curve = _draw(shared, mean, points, low, high)
    at = curve.pop("places")
    for side, pick in (("low", np.min), ("high", np.max)):
        curve[side] = _plain(pick(table, axis=0)[at]) if len(columns) else []
    lead = columns[0][0] if columns else runs[0]
    members = [run.name for run, *_ in columns]
    return {"run": label, "runs": members, "metric": name, "x": _places(lead, curve["steps"], axis), **curve}


def _draw(steps: np.ndarray, values: np.ndarray, points: int, low: float | None, high: float | None) -> dict[str, Any]:
    start = 0 if low is None else int(np.searchsorted(steps, low))
    end = len(steps) if high is None else max(start, int(np.searchsorted(steps, high, side="right")))
    places = start + thin(steps[start:end], values[start:end], points)
    return {
        "steps": steps[places].tolist(),
        "values": _plain(values[places]),
        "hidden": end - start - len(places),
        "not_finite": int((~np.isfinite(values[start:end])).sum()),
        "total": len(steps),
        "places": places.tolist(),
    }


def _plain(values: np.ndarray) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]


def _places(run: RunView, steps: Sequence[float], axis: str) -> Sequence[float]:
    """Positions of steps [k] on the axis, interpolated between known steps."""
    if axis == "step" or not len(steps):
        return steps
    theirs, values = times_of(run.series.column) if axis == "time" else run.series.column("num_tokens")
    finite = np.isfinite(values)
    theirs, values = theirs[finite], values[finite]
    if not len(theirs):
        return steps
    at = elapsed(values, run.manifest()) / 3600 if axis == "time" else np.cumsum(np.maximum(values, 0))
    placed: list[float] = np.interp(np.asarray(steps, float), theirs, np.maximum.accumulate(at)).tolist()
    return placed


def as_csv(columns: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> str:
    """Every step with a column for each name; empty where there is no value, `nan` where it was not finite."""
    steps = np.unique(np.concatenate([np.zeros(0), *(steps for steps, _ in columns.values())]))
    cells: list[list[Any]] = [[int(step) for step in steps]]
    for theirs, values in columns.values():
        column: list[Any] = [""] * len(steps)
        for at, value in zip(np.searchsorted(steps, theirs).tolist(), values.tolist(), strict=True):
            column[at] = repr(value) if np.isfinite(value) else "nan"
        cells.append(column)
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["step", *map(_cell, columns)])
    table.writerows(zip(*cells, strict=True))
    return out.getvalue()


def _cell(name: str) -> str:
    """A name that no spreadsheet takes for a formula."""
    return f"'{name}" if name[:1] in "=+-@\t\r" else name


def thin(steps: np.ndarray, values: np.ndarray, points: int) -> np.ndarray:
    """Places [k] of at most about `points` of `steps` [n] (in order) and `values` [n] (`inf`: not finite).

    Buckets are powers of two of steps wide and start at multiples of it, so a reload or a shifted window draws the same points.
    """
    if len(steps) <= points:
        return np.arange(len(steps))
    bad = ~np.isfinite(values)
    span = float(steps[-1] - steps[0]) + 1
    width = 1
    while span / width > points / 2:
        width *= 2
    starts = np.flatnonzero(np.diff(steps // width, prepend=-1))
    chosen = [  # `inf` stands for values that are not finite
        _first_where(values == _each(np.minimum, values, starts), starts),
        _first_where(values == _each(np.maximum, np.where(bad, -np.inf, values), starts), starts),
        _first_where(bad, starts),
    ]
    return np.unique(np.concatenate(chosen))


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
    sums, counts = _window_sums(np.where(finite, values, 0.0), window), _window_sums(finite.astype(np.int64), window)
    return np.where(finite, sums / np.maximum(counts, 1), values)


def _window_sums(values: np.ndarray, window: int) -> np.ndarray:
    """Sum of the last `window` values at each place [n], by windows of powers of two: no difference of sums, which a spike would rule."""
    sums, part, size, read = np.zeros_like(values), values, 1, 0
    while size <= window and read < len(values):
        if window & size:
            sums[read:] += part[: len(values) - read]
            read += size
        part = np.concatenate([part[:size], part[size:] + part[:-size]]) if size < len(part) else part
        size *= 2
    return sums
