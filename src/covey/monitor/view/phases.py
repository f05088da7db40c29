"""Time and memory of a run's steps by phase."""

from typing import Any

import numpy as np

from covey.monitor.view.series import SeriesIndex

_SECONDS = "seconds/"
_MEMORY = "memory/"
_STEP = "seconds/step"


def phases_of(series: SeriesIndex, points: int, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    """By bucket of steps: mean seconds of each phase (`other`: the rest of the step), tokens a second, and the
    peak of each memory. At most `points` buckets; lists [k] under `steps`, `seconds`, `memory`, `speed`."""
    names = [name for name in series.names() if name.startswith(_SECONDS) and name != _STEP]
    steps, whole = _between(*series.column(_STEP), low, high)
    empty: dict[str, Any] = {"steps": [], "seconds": {}, "memory": {}, "speed": []}
    if not len(steps):
        return empty
    width = max(1, -(-int(steps[-1] - steps[0] + 1) // points))
    starts = np.flatnonzero(np.diff(steps // width, prepend=-1))
    counts = np.diff(np.append(starts, len(steps)))
    mean = lambda values: np.add.reduceat(values, starts) / counts
    seconds = {name.removeprefix(_SECONDS): mean(_at(series, name, steps)) for name in names}
    rest = mean(whole) - sum(seconds.values(), np.zeros(len(starts)))
    memory = {name.removeprefix(_MEMORY): np.fmax.reduceat(_at(series, name, steps), starts)
              for name in series.names() if name.startswith(_MEMORY)}  # fmt: skip
    speed = mean(_at(series, "num_tokens", steps)) / np.maximum(mean(whole), 1e-9)
    return {
        "steps": steps[starts].tolist(),
        "seconds": {name: part.tolist() for name, part in (seconds | {"other": np.maximum(rest, 0.0)}).items()},
        "memory": {name: part.tolist() for name, part in memory.items()},
        "speed": speed.tolist(),
    }


def _between(
    steps: np.ndarray, values: np.ndarray, low: float | None, high: float | None
) -> tuple[np.ndarray, np.ndarray]:
    keep = np.isfinite(values)
    if low is not None:
        keep &= steps >= low
    if high is not None:
        keep &= steps <= high
    return steps[keep], values[keep]


def _at(series: SeriesIndex, name: str, steps: np.ndarray) -> np.ndarray:
    """A metric at these steps [n]; 0 where it is not known."""
    theirs, values = series.column(name)
    if not len(theirs):
        return np.zeros(len(steps))
    places = np.minimum(np.searchsorted(theirs, steps), len(theirs) - 1)
    return np.where((theirs[places] == steps) & np.isfinite(values[places]), values[places], 0.0)
