"""Learning curves of each side, with a band over its seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from covey.evaluation.compare.results import Result, Score, logged_mean
from covey.evaluation.compare.run_data import Run
from covey.evaluation.compare.sides import Side
from covey.evaluation.intervals import finite_mean, mean_of_few

Points = Sequence[tuple[float, float]]
"""Steps and values, in order."""

TRAINING = {
    "reward": "training reward",
    "completions/mean_length": "tokens of a completion",
    "entropy": "entropy",
    "kl": "KL to the reference",
    "grad_norm": "gradient norm",
    "frac_reward_zero_std": "groups without signal",
}
"""Metrics of `metrics.jsonl` that are drawn, where every side has them."""
_MOST_POINTS = 60


@dataclass(frozen=True, kw_only=True)
class Line:
    """One side's curve."""

    steps: Sequence[float]
    middle: Sequence[float]
    """Mean over the runs."""
    low: Sequence[float]
    high: Sequence[float]
    """Three runs or more: Student's 95% interval of the mean. Two: the lower and the higher. One: the curve itself."""
    runs: Sequence[Points]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One quantity over training, a line a side."""

    name: str
    title: str
    scale: float
    lines: Sequence[Line]


def curves_of(sides: Sequence[Side], results: Sequence[Result]) -> list[Curve]:
    """Held-out curves of every result, then those of training; quantities that a side does not have are left out."""
    curves = [held_out(sides, result) for result in results]
    for name, title in TRAINING.items():
        last = max((row["step"] for side in sides for run in side.runs for row in run.curve), default=0)
        lines = [line_of([training_points(run, name, last) for run in side.runs]) for side in sides]
        if all(line.steps for line in lines):
            curves.append(Curve(name=name, title=title, scale=1.0, lines=lines))
    return curves


def line_of(runs: Sequence[Points]) -> Line:
    """Mean and band at every step that a run has; at each over the runs that have it."""
    at: dict[float, list[float]] = {}
    for points in runs:
        for step, value in points:
            at.setdefault(step, []).append(value)
    steps = sorted(at)
    bands = [_band(at[step]) for step in steps]
    return Line(
        steps=steps,
        middle=[middle for middle, _, _ in bands],
        low=[low for _, low, _ in bands],
        high=[high for _, _, high in bands],
        runs=runs,
    )


def _band(values: Sequence[float]) -> tuple[float, float, float]:
    middle = sum(values) / len(values)
    if len(values) < 3:
        return middle, min(values), max(values)
    estimate = mean_of_few(values)
    return estimate.value, estimate.low, estimate.high


def held_out(sides: Sequence[Side], result: Result) -> Curve:
    lines = [line_of([_evaluations(run, result.set_name, result.score) for run in side.runs]) for side in sides]
    name = f"{result.set_name}/{result.score.column}"
    return Curve(name=name, title=f"held-out {result.title}", scale=result.scale, lines=lines)


def _evaluations(run: Run, set_name: str, score: Score) -> Points:
    points = []
    for step in sorted(run.evaluated[set_name]):
        value = logged_mean(run, set_name, step, score)
        if math.isnan(value):
            value = finite_mean(score.of(run.answers(set_name, step))[0].values())
        if not math.isnan(value):
            points.append((float(step), value))
    return points


def training_points(run: Run, name: str, last: int) -> Points:
    """One metric, averaged over stretches of steps, the same in every run, so that at most 60 points are drawn."""
    width = max(1, math.ceil(last / _MOST_POINTS))
    stretches: dict[int, list[float]] = {}
    for row in run.curve:
        value = number_of(row, name)
        if value is not None:
            stretches.setdefault((row["step"] - 1) // width, []).append(value)
    center = (width + 1) / 2
    return [(place * width + center, sum(held) / len(held)) for place, held in sorted(stretches.items())]


def number_of(row: Mapping[str, object], name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
