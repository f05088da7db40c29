"""Forgetting on a fixed set: the best earlier evaluation minus this one, question by question (Chaudhry et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.errors import RunFolderError
from covey.evaluation.intervals import paired_difference
from covey.runs import evaluations
from covey.runs.evaluations import by_question


def forgetting(folder: Path, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics `<name>_forgetting` with `/low` and `/high` (95%) and `/p`; none without an earlier evaluation of the questions.

    `folder` is the run's `evaluations`. The best of `k` earlier evaluations is high partly by chance, so the p-value is
    multiplied by `k` (Bonferroni). Above 0: mean reward that the policy had and lost.
    """
    now = by_question(rows)
    earlier = [_questions(folder, name, at) for at in evaluations.steps(folder, name.replace("/", "_")) if at < step]
    earlier = [scores for scores in earlier if scores and scores.keys() == now.keys()]
    if not earlier:
        return {}
    best = max(earlier, key=lambda scores: sum(x for x in scores.values() if x == x))
    found = paired_difference(list(now.values()), [best[question] for question in now])
    if found.count == 0:
        return {}
    prefix = f"{name}_forgetting"
    return {
        prefix: found.value,
        f"{prefix}/low": found.low,
        f"{prefix}/high": found.high,
        f"{prefix}/p": min(1.0, found.p_value * len(earlier)),
    }


def _questions(folder: Path, name: str, step: int) -> dict[str, float]:
    """Mean reward by question of one evaluation; empty if its file is damaged."""
    try:
        return by_question(evaluations.read(folder / name.replace("/", "_") / f"step-{step:06d}.parquet"))
    except RunFolderError:
        return {}
