"""A trial of `covey tune` while it runs: its folder, and its evaluations as they are written."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, eq=False)
class Attempt:
    """A trial that is about to run, or to go on."""

    trial: Any
    """Optuna's."""
    place: Path
    watch: Watch
    started: float = field(default_factory=time.perf_counter)

    @property
    def number(self) -> int:
        return int(self.trial.number)

    @property
    def params(self) -> Mapping[str, Any]:
        """Values of the searched options."""
        return dict(self.trial.params)

    @property
    def log(self) -> Path:
        return Path(f"{self.place}.log")


class Watch:
    """Reads a trial's evaluations as they are written; decides when the trial is pruned."""

    def __init__(self, place: Path, metric: str, trial: Any) -> None:
        self._path = place / "evaluations.jsonl"
        self._metric, self._trial = metric, trial
        self._seen = set(trial.study.trials[trial.number].intermediate_values)
        self.is_pruned = False
        self.last = math.nan

    def is_hopeless(self) -> bool:
        """Report every new evaluation; True once the pruner says that the trial is not worth going on with."""
        from covey.runs.metrics import read

        if self.is_pruned or not self._path.is_file():
            return self.is_pruned
        for row in read(self._path):
            value, step = number_of(row.get(self._metric)), row.get("step")
            if not isinstance(step, int) or step in self._seen or not math.isfinite(value):
                continue
            self._seen.add(step)
            self._trial.report(value, step)
            self.last = value
            self.is_pruned = self.is_pruned or bool(self._trial.should_prune())
        return self.is_pruned


def number_of(value: Any) -> float:
    """`value`, or NaN if it is none."""
    return float(value) if isinstance(value, int | float) else math.nan
