"""Columns of the table of runs that are not a metric's newest value: model, data, steps in all, duration, best held-out reward."""

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from covey.config.fields import Options
from covey.config.options import defaults_of, is_changed
from covey.monitor.view.records import is_step, text_of

Column = Callable[[str], tuple[np.ndarray, np.ndarray]]
"""Steps [n] and values [n] of a metric by its name."""

FIELDS = ("model", "data", "steps", "seconds", "best", "reward_from", "reward_to", "doubles")
_ENDS = 5
"""Steps whose mean is the reward at the start, and at the end."""
_MOST_COMPARED = 1000
_LONGEST = 120
_REWARD = re.compile(r"(?:eval_)?rewards/.+/mean")
_DATASET = re.compile(r"^dataset: *[\"']?([^\"'\n]+?)[\"']? *$", re.MULTILINE)


def about(run_json: Mapping[str, Any], path: Path, names: Iterable[str], column: Column) -> dict[str, Any]:
    """Values of FIELDS; None where a run does not say."""
    config = run_json.get("config")
    most = config.get("max_steps") if isinstance(config, Mapping) else None
    _, times = times_of(column)
    rewards = _finite(column("reward")[1])
    steps, held_out = column("eval_reward")
    is_finite = np.isfinite(held_out)
    best = int(np.argmax(np.where(is_finite, held_out, -np.inf))) if is_finite.any() else None
    return {
        "model": _short_name(run_json.get("model")),
        "data": _data_of(path) or _shape_of(run_json.get("dataset")),
        "steps": most if isinstance(most, int) and is_step(most) and most > 0 else None,
        "seconds": float(elapsed(times, run_json)[-1]) if len(times) > 1 else None,
        "best": None if best is None else {"value": float(held_out[best]), "step": int(steps[best])},
        "reward_from": float(rewards[:_ENDS].mean()) if len(rewards) else None,
        "reward_to": float(rewards[-_ENDS:].mean()) if len(rewards) else None,
        "doubles": _doubles(names, column),
    }


def times_of(column: Column) -> tuple[np.ndarray, np.ndarray]:
    """Steps [n] and their times [n] by the clock as it was before anyone set it, or the machine slept, in the middle of an attempt."""
    steps, times = column("time")
    steps, times = steps[np.isfinite(times)], _finite(times)
    changed, offsets = column("clock_offset")
    if len(changed):
        at = np.searchsorted(changed, steps).clip(max=len(changed) - 1)
        times = times - np.where((changed[at] == steps) & np.isfinite(offsets[at]), offsets[at], 0.0)
    return steps, times


def elapsed(times: np.ndarray, run_json: Mapping[str, Any]) -> np.ndarray:
    """Seconds [n] from the first step to each, by the clock times [n] of the steps, without those in which no process trained.

    Of a run that waited for its resume, these are the seconds from the last step before to the start of the next attempt. A clock
    that is set back stands still.
    """
    seconds = np.maximum(np.diff(times, prepend=times[:1]), 0.0)
    for started in _starts(run_json):
        place = int(np.argmax(times >= started)) if len(times) else 0
        if place:
            seconds[place] = min(seconds[place], times[place] - started)
    return np.cumsum(seconds)


def _starts(run_json: Mapping[str, Any]) -> list[float]:
    """When each attempt of a run began, in seconds since 1970, as far as known."""
    attempts = run_json.get("attempts")
    entries = [entry for entry in attempts if isinstance(entry, Mapping)] if isinstance(attempts, list) else []
    starts = []
    for entry in entries:
        with suppress(ValueError, OverflowError):
            starts.append(datetime.fromisoformat(text_of(entry.get("started"))).timestamp())
    return starts


def changed_options(run_json: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a run that differ from their defaults; options without a known default are left out."""
    config = run_json.get("config")
    if not isinstance(config, Mapping):
        return {}
    defaults = defaults_of(Options)
    return {name: value for name, value in config.items() if name in defaults and is_changed(value, defaults[name])}


def _doubles(names: Iterable[str], column: Column) -> list[str]:
    """Metrics of a run's only reward that repeat `reward`, or in evaluations `eval_reward`."""
    single = [name for name in names if _REWARD.fullmatch(name)]
    pairs = [(name, "eval_reward" if name.startswith("eval_") else "reward") for name in single]
    alone = [(name, base) for name, base in pairs if [other for _, other in pairs].count(base) == 1]
    return [name for name, base in alone if _is_same(column(base), column(name))]


def _is_same(first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]) -> bool:
    """True for two curves with the same steps and values."""
    pairs = zip(first, second, strict=True)
    return len(first[0]) > 0 and all(
        np.array_equal(a[-_MOST_COMPARED:], b[-_MOST_COMPARED:], equal_nan=True) for a, b in pairs
    )


def _short_name(model: Any) -> str | None:
    """`Qwen/Qwen2.5-7B` of a hub id, the last two folders of a path; LoRA is named."""
    name = text_of(model.get("name")) if isinstance(model, Mapping) else ""
    if not name:
        return None
    short = "/".join(Path(name).parts[-2:]) if name.startswith(("/", ".", "~")) else name
    return f"{short[:_LONGEST]}{' + adapter' if model.get('adapter') else ''}"


def _data_of(path: Path) -> str | None:
    """The data set in the run's `train.yaml`; None for a run of a script or of the demo."""
    try:
        with (path / "train.yaml").open(encoding="utf-8", errors="replace") as file:
            match = _DATASET.search(file.read(100_000))
    except OSError:
        return None
    return match[1][:_LONGEST] if match else None


def _shape_of(dataset: Any) -> str | None:
    """`4096 rows: prompt, answer` of a data set that has no name; None where the run does not say."""
    rows = dataset.get("rows") if isinstance(dataset, Mapping) else None
    columns = dataset.get("columns") if isinstance(dataset, Mapping) else None
    if not is_step(rows):
        return None
    names = ", ".join(map(text_of, columns)) if isinstance(columns, list) else ""
    return f"{rows} rows{': ' if names else ''}{names}"[:_LONGEST]


def _finite(values: np.ndarray) -> np.ndarray:
    finite: np.ndarray = values[np.isfinite(values)]
    return finite
