"""Curves of a metric: over steps, time or tokens, with the interval of held-out means, or the band of several seeds."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from covey.monitor.view.downsampling import smooth, thin

if TYPE_CHECKING:
    from covey.monitor.view.reading import RunView

AXES = ("step", "time", "tokens")
"""Steps; hours since the first step; tokens of prompts and completions so far."""
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
    end = len(steps) if high is None else int(np.searchsorted(steps, high, side="right"))
    drawn = thin(steps[start:end], values[start:end], points)
    return {
        "steps": drawn.steps.tolist(),
        "values": _plain(drawn.values),
        "hidden": drawn.hidden,
        "not_finite": drawn.not_finite,
        "total": len(steps),
        "places": (drawn.places + start).tolist(),
    }


def _plain(values: np.ndarray) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]


def _places(run: RunView, steps: Sequence[float], axis: str) -> Sequence[float]:
    """Positions of steps [k] on the axis, interpolated between known steps."""
    if axis == "step" or not len(steps):
        return steps
    theirs, values = run.series.column("time" if axis == "time" else "num_tokens")
    finite = np.isfinite(values)
    theirs, values = theirs[finite], values[finite]
    if not len(theirs):
        return steps
    at = (values - values[0]) / 3600 if axis == "time" else np.cumsum(np.maximum(values, 0))
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
