"""Data of the figures of runs: curves with bands, shares of rewards in the advantage, agreement of verdicts."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from covey.errors import ConfigError, RunFolderError, did_you_mean
from covey.evaluation import intervals
from covey.evaluation.compare.curves import TRAINING, Curve, Line, line_of, number_of, training_points
from covey.evaluation.compare.run_data import Run
from covey.evaluation.compare.sides import Side, as_sides, grouped
from covey.runs import rollouts
from covey.runs.evaluations import by_question

_SHARE = "/advantage_share"
_MOST_INTERVALS = 100
_MOST_FILES = 20
"""Files of rollouts that verdicts are counted in: the newest."""
_MOST_REWARDS = 4


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Parts of a whole by step, drawn on each other."""

    name: str
    title: str
    steps: Sequence[float]
    parts: Mapping[str, Sequence[float]]
    """[k] by name; negative shares are drawn as 0."""


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """Agreement of two verdicts on the same answers: counts [2, 2], wrong before right."""

    name: str
    title: str
    rows: str
    columns: str
    counts: Sequence[Sequence[int]]

    @property
    def agreement(self) -> float:
        """Share of answers on which both say the same."""
        return (self.counts[0][0] + self.counts[1][1]) / max(1, sum(map(sum, self.counts)))


Figure = Curve | Shares | Confusion


def figures_of(
    runs: Sequence[Run], metrics: Sequence[str] = (), *, is_each: bool = False
) -> tuple[list[str], list[Figure]]:
    """Titles of the sides (runs that differ in the seed alone are one), and the figures.

    Without `metrics` the usual ones: held-out rewards, `TRAINING`, each reward, reward shares, verdicts. `metrics` names some
    of `metrics.jsonl` or `evaluations.jsonl`. Raises ConfigError for a metric that no run has, RunFolderError where nothing is recorded.
    """
    sides = as_sides([[run] for run in runs]) if is_each else grouped(runs)
    alone = len(sides) == 1
    titles = [_title(side, alone=alone) for side in sides]
    if metrics:
        return titles, [_curve_of(sides, name) for name in metrics]
    figures: list[Figure] = [*_held_out(sides), *_training(sides)]
    for side, title in zip(sides, titles, strict=True):
        about = "" if alone else f", {title}"
        figures += [*_shares(side, about), *_verdicts(side, about)]
    if not figures:
        raise RunFolderError(f"{runs[0].path} has recorded nothing to draw yet: no metrics.jsonl with a finished step.")
    return titles, figures


def _title(side: Side, *, alone: bool) -> str:
    if len(side.runs) == 1:
        return side.runs[0].name
    name = side.name or side.runs[0].name
    seeds = {run.seed for run in side.runs}
    count = f"{len(side.runs)} seeds" if len(seeds) == len(side.runs) else f"{len(side.runs)} runs"
    return f"{name if alone or side.name else side.letter}, {count}"


def _curve_of(sides: Sequence[Side], name: str) -> Curve:
    recorded_names = {key for side in sides for run in side.runs for row in run.curve for key in row}
    sets = {
        key: set_name
        for side in sides
        for run in side.runs
        for set_name, rows in run.evaluated.items()
        for row in rows.values()
        for key in row
    }
    if name in sets:
        return Curve(name=name, title=name, scale=1.0, lines=[_held_line(side, sets[name], name) for side in sides])
    lines = [_training_line(side, name) for side in sides]
    if not any(line.steps for line in lines):
        near = did_you_mean(name, {*recorded_names, *sets})
        raise ConfigError(
            f"No run has numbers of a metric {name!r}.{near} metrics.jsonl has the names, docs/runs.md what they mean."
        )
    return Curve(name=name, title=TRAINING.get(name, name), scale=1.0, lines=lines)


def _held_out(sides: Sequence[Side]) -> list[Curve]:
    sets = sorted({name for side in sides for run in side.runs for name in run.evaluated})
    curves = []
    for name in sets:
        lines = [_held_line(side, name, f"{name}_reward") for side in sides]
        if any(line.steps for line in lines):
            curves.append(Curve(name=f"{name}_reward", title=f"held-out reward on {name}", scale=1.0, lines=lines))
    return curves


def _held_line(side: Side, set_name: str, metric: str) -> Line:
    runs = []
    for run in side.runs:
        rows = run.evaluated.get(set_name, {})
        values = [(float(step), number_of(rows[step], metric)) for step in sorted(rows)]
        runs.append([(step, value) for step, value in values if value is not None])
    line = line_of(runs)
    if len(side.runs) > 1 or metric != f"{set_name}_reward" or len(line.steps) > _MOST_INTERVALS:
        return line
    ends = [interval_at(side.runs[0], set_name, int(step)) for step in line.steps]
    if not ends or any(end is None for end in ends):
        return line
    low, high = zip(*(end for end in ends if end is not None), strict=True)
    return Line(steps=line.steps, middle=line.middle, low=low, high=high, runs=line.runs)


def interval_at(run: Run, set_name: str, step: int) -> tuple[float, float] | None:
    """The 95% interval of the mean reward over questions; None where the answers were not kept, or are too few."""
    values = [value for value in by_question(run.answers(set_name, step), "reward").values() if not math.isnan(value)]
    if len(values) < 2:
        return None
    estimate = intervals.mean_reward(values)
    return (estimate.low, estimate.high) if math.isfinite(estimate.low) else None


def _training_line(side: Side, name: str) -> Line:
    last = max((row["step"] for run in side.runs for row in run.curve), default=0)
    return line_of([training_points(run, name, last) for run in side.runs])


def _training(sides: Sequence[Side]) -> list[Curve]:
    rewards = sorted({name for side in sides for run in side.runs for name in _last_row(run)
                      if name.startswith("rewards/") and name.endswith("/mean")})  # fmt: skip
    named = {**TRAINING, **({name: f"reward {name.split('/')[1]}" for name in rewards} if len(rewards) > 1 else {})}
    curves = []
    for name, title in named.items():
        lines = [_training_line(side, name) for side in sides]
        if any(line.steps for line in lines):
            curves.append(Curve(name=name, title=title, scale=1.0, lines=lines))
    return curves


def _last_row(run: Run) -> Mapping[str, Any]:
    return run.curve[-1] if run.curve else {}


def _shares(side: Side, about: str) -> list[Shares]:
    """Mean share of each reward in the advantage, over the runs of a side; nothing of a run with one reward."""
    names = sorted({name for run in side.runs for name in _last_row(run) if name.endswith(_SHARE)})
    if len(names) < 2:
        return []
    lines = {name: _training_line(side, name) for name in names}
    at = {name: dict(zip(line.steps, line.middle, strict=True)) for name, line in lines.items()}
    steps = sorted({step for line in lines.values() for step in line.steps})
    parts = {name.split("/")[1]: [max(0.0, at[name].get(step, 0.0)) for step in steps] for name in names}
    return [
        Shares(name="advantage_share", title=f"share of each reward in the advantage{about}", steps=steps, parts=parts)
    ]


def _verdicts(side: Side, about: str) -> list[Confusion]:
    """Agreement of rewards that give 0 or 1 in the newest rollouts, and of the first and the last evaluation."""
    rows = [row for run in side.runs for row in recorded(run.path)]
    names = [name for name in (rows[0] if rows else {}) if name.startswith("reward/") and _is_verdict(rows, name)]
    confusions = []
    for first, second in combinations(names[:_MOST_REWARDS], 2):
        counts = _count((row.get(first), row.get(second)) for row in rows)
        label, other = first.partition("/")[2], second.partition("/")[2]
        title = f"verdicts of {label} and {other}{about}"
        confusions.append(Confusion(name=f"{label} {other}", title=title, rows=label, columns=other, counts=counts))
    return [*confusions, *_before_and_after(side, about)]


def recorded(run: Path, most: int = _MOST_FILES) -> list[dict[str, Any]]:
    """Rows of the newest files of rollouts; of files that cannot be read, none."""
    rows: list[dict[str, Any]] = []
    for step in rollouts.steps(run / "rollouts")[-most:]:
        try:
            rows += rollouts.read(rollouts.path_of(run / "rollouts", step), "reward")
        except RunFolderError:
            continue
    return rows


def _is_verdict(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return {row.get(name) for row in rows} - {None} == {0.0, 1.0}


def _before_and_after(side: Side, about: str) -> list[Confusion]:
    confusions = []
    for name in sorted({name for run in side.runs for name in run.evaluated}):
        pairs: list[tuple[float | None, float | None]] = []
        for run in side.runs:
            steps = sorted(run.evaluated.get(name, {}))
            if len(steps) > 1:
                before, after = (by_question(run.answers(name, step), "reward") for step in (steps[0], steps[-1]))
                pairs += [(before[question], after[question]) for question in before.keys() & after.keys()]
        values = {value for pair in pairs for value in pair}
        if pairs and values <= {0.0, 1.0}:
            title = f"questions of {name}, first and last evaluation{about}"
            named = {"name": f"{name} before and after", "title": title, "rows": "first", "columns": "last"}
            confusions.append(Confusion(**named, counts=_count(pairs)))
    return confusions


def _count(pairs: Any) -> list[list[int]]:
    counts = Counter((first > 0, second > 0) for first, second in pairs if first is not None and second is not None)
    return [[counts[row, other] for other in (False, True)] for row in (False, True)]


def step_of(run: Run) -> int:
    """The newest step with metrics; 0 before the first."""
    return int(run.curve[-1]["step"]) if run.curve else 0


def last_values(run: Run) -> dict[str, float]:
    """The newest held-out rewards, reward, KL and entropy, where there are numbers."""
    values = {f"held-out reward ({name})": run.mean_at(name, max(rows)) for name, rows in run.evaluated.items() if rows}
    row = run.curve[-1] if run.curve else {}
    values |= {name: row[name] for name in ("reward", "kl", "entropy") if isinstance(row.get(name), int | float)}
    return {name: value for name, value in values.items() if value == value}
