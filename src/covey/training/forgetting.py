"""Forgetting on a fixed set: the best earlier evaluation minus this one, question by question (Chaudhry et al. 2018)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from covey.evaluation.intervals import paired_difference
from covey.runs.evaluations import by_question


@dataclass
class Forgetting:
    """The best evaluation so far of each set. Part of checkpoints, so that a resumed run compares with the same one."""

    best: dict[str, dict[str, float]] = field(default_factory=dict)
    """Mean reward by question of the best evaluation, by the name of the set; NaN where nothing was scored."""
    looks: dict[str, int] = field(default_factory=dict)
    """Evaluations so far."""

    def __call__(self, name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Metrics `<name>_forgetting` with `/low` and `/high` (95%) and `/p`; none for the first evaluation of these questions.

        `rows` as of `covey.runs.evaluations.rows_of`. The best of `k` earlier evaluations is high partly by chance, so the
        p-value is multiplied by `k` (Bonferroni). Above 0: mean reward that the policy had and lost.
        """
        now = by_question(rows)
        best = self.best.get(name, {})
        if not now or best.keys() != now.keys():
            self.best[name], self.looks[name] = now, 1
            return {}
        found = paired_difference(list(now.values()), [best[question] for question in now])
        count = self.looks[name]
        self.looks[name] += 1
        if _mean(now) > _mean(best):
            self.best[name] = now
        prefix = f"{name}_forgetting"
        return {} if found.count == 0 else {
            prefix: found.value,
            f"{prefix}/low": found.low,
            f"{prefix}/high": found.high,
            f"{prefix}/p": min(1.0, found.p_value * count),
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"best": {name: dict(scores) for name, scores in self.best.items()}, "looks": dict(self.looks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = {name: dict(scores) for name, scores in state["best"].items()}
        self.looks = dict(state["looks"])


def _mean(scores: Mapping[str, float]) -> float:
    known = [score for score in scores.values() if not math.isnan(score)]
    return sum(known) / len(known) if known else -math.inf
