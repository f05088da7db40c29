"""Intervals of the held-out results of a run, over questions, from the answers that every evaluation left."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from covey.evaluation import intervals
from covey.monitor.view.groups import read_columns
from covey.runs import evaluations

_METRIC = re.compile(r"(?P<set>eval.*?)_(?:reward|rewards/(?P<reward>.+)/mean)")
_MOST_STEPS = 400


class HeldOut:
    """Intervals of a run's held-out means, by metric and step; each file is read once, while it stays the same."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unreadable: dict[str, str] = {}
        """Files that could not be read, and why."""
        self._cache: dict[tuple[str, int], tuple[tuple[int, int], Mapping[str, intervals.Estimate]]] = {}

    def interval(self, metric: str, step: int) -> tuple[float, float] | None:
        """Ends of the 95% interval of a mean reward over the questions; None where the answers are not there, or too few."""
        match = _METRIC.fullmatch(metric)
        if match is None:
            return None
        estimates = self._of(match["set"], step)
        estimate = estimates.get("reward" if match["reward"] is None else f"reward/{match['reward']}")
        if estimate is None or estimate.count < 2 or not math.isfinite(estimate.low):
            return None
        return estimate.low, estimate.high

    def _of(self, name: str, step: int) -> Mapping[str, intervals.Estimate]:
        path = evaluations.path_of(self.folder, name, step)
        try:
            facts = path.lstat()
        except OSError:
            return {}
        mark = (facts.st_size, facts.st_mtime_ns)
        cached = self._cache.get((name, step))
        if cached is None or cached[0] != mark:
            cached = (mark, self._read(path))
            if len(self._cache) >= _MOST_STEPS:
                self._cache.clear()
            self._cache[name, step] = cached
        return cached[1]

    def _read(self, path: Path) -> Mapping[str, intervals.Estimate]:
        try:
            table = read_columns(path, depth=3)
            rows = table.to_pylist()
            rewards = [column for column in table.column_names if column == "reward" or column.startswith("reward/")]
            estimates = {
                column: intervals.mean_reward(list(evaluations.by_question(rows, column).values()))
                for column in rewards
            }
        except (OSError, ValueError, KeyError, TypeError, OverflowError, pa.ArrowException) as error:
            self.unreadable[f"{path.parent.name}/{path.name}"] = str(error)[:300]
            return {}
        self.unreadable.pop(f"{path.parent.name}/{path.name}", None)
        return estimates
