"""A comparison as tables, for the terminal, Markdown and HTML alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from covey.evaluation.compare.report import Comparison
from covey.evaluation.compare.results import Result
from covey.evaluation.intervals import Estimate


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as text, a header above."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables_of(comparison: Comparison) -> list[Table]:
    """Tables of sides, of differences (where there are any), and one a held-out set."""
    tables = [_sides(comparison)]
    if comparison.differences:
        tables.append(_differences(comparison))
    return [*tables, *(_result(comparison, result) for result in comparison.results)]


def _sides(comparison: Comparison) -> Table:
    rows = []
    for side in comparison.sides:
        seeds = ", ".join("-" if run.seed is None else str(run.seed) for run in side.runs)
        folders = ", ".join(str(run.path) for run in side.runs)
        rows.append([side.title, str(len(side.runs)), seeds, folders])
    return Table(title="sides", header=["side", "runs", "seeds", "folders"], rows=rows)


def _differences(comparison: Comparison) -> Table:
    rows = [[f"{difference.area}: {difference.name}", *difference.values] for difference in comparison.differences]
    return Table(title="what differs", header=["", *(side.letter for side in comparison.sides)], rows=rows)


def _result(comparison: Comparison, result: Result) -> Table:
    rows = []
    for i, side in enumerate(comparison.sides):
        effect = result.effects[i - 1] if i else None
        runs = "  ".join(_number(result, run.mean) for run in result.runs[i])
        apart, p_value, verdict = "", "", ""
        if effect is not None:
            apart = _interval(result, effect.value, effect.low, effect.high, sign="+")
            p_value = f"{effect.p_value:.2g}"
            verdict = ("better" if effect.value > 0 else "worse") if effect.is_real else "cannot be told"
        rows.append([side.title, _estimate(result, result.means[i]), runs, apart, p_value, verdict])
    against = f"against {comparison.sides[0].letter}"
    return Table(
        title=f"held-out {result.title}", header=["side", "mean (95%)", "by run", against, "p", "verdict"], rows=rows
    )


def _estimate(result: Result, mean: Estimate) -> str:
    return _interval(result, mean.value, mean.low, mean.high)


def _interval(result: Result, value: float, low: float, high: float, sign: str = "") -> str:
    shown = _number(result, value, sign)
    if math.isinf(low):
        return f"{shown} (not known)"
    return f"{shown} ({_number(result, low)} to {_number(result, high)})"


def _number(result: Result, value: float, sign: str = "") -> str:
    return format(result.scale * value + 0.0, f"{sign}.1f" if result.is_share else f"{sign}.3f")
