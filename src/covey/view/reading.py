"""What the page asks for, read from run folders while they grow."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from covey.errors import RunFolderError, did_you_mean
from covey.runs import manifest, metrics, status
from covey.view.found import find_runs
from covey.view.groups import GroupIndex
from covey.view.series import SeriesIndex
from covey.view.thinning import smooth, thin

_SHARE = 16 << 20
"""Bytes of one run's metrics that are indexed before another run has its turn."""
_FIRST_SHARE = 1 << 20
"""Little, so that there is soon something to show."""
_FILES_AT_ONCE = 50
_POLITE_SECONDS = 0.15
"""So long after a question the indexing leaves the processor to the answers, half of the time."""
_SHOWN = ("reward", "eval_reward", "kl", "entropy", "completions/mean_length", "loss", "step_time")


class RunView:
    """One run: its indexes and its small files."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.series = SeriesIndex(path / "metrics.jsonl")
        self.groups = GroupIndex(path / "rollouts")
        self._lines: dict[str, tuple[tuple[int, int], list[dict[str, Any]]]] = {}

    def refresh_some(self) -> bool:
        """Index a share of what is new. Whether nothing is left."""
        series_done = self.series.refresh(_SHARE if self.series.done else _FIRST_SHARE)
        return self.groups.refresh(_FILES_AT_ONCE) and series_done

    def manifest(self) -> dict[str, Any]:
        """`run.json`, with the state that the run really is in."""
        found = manifest.read(self.path / manifest.NAME) or {}
        return found | {"state": status.state_of(found, self.path)}

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The rows of a small log (`alerts.jsonl`, `events.jsonl`), read again when it has changed."""
        path = self.path / name
        try:
            facts = path.stat()
        except FileNotFoundError:
            return []
        mark = (facts.st_size, facts.st_mtime_ns)
        if name not in self._lines or self._lines[name][0] != mark:
            self._lines[name] = (mark, metrics.read(path))
        return self._lines[name][1]

    def overview(self) -> dict[str, Any]:
        """One row of the table of runs."""
        found = self.manifest()
        alerts = self.lines("alerts.jsonl")
        return {
            "name": self.name,
            "path": str(self.path),
            "state": found.get("state", "unknown"),
            "created": found.get("created"),
            "step": self.series.last_step() or found.get("step", 0),
            "algorithm": _name_of(found.get("algorithm")),
            "parent": found["parent"].get("run") if isinstance(found.get("parent"), Mapping) else None,
            "alerts": len(alerts),
            "last": {name: self.series.last(name) for name in _SHOWN},
            "metrics": self.series.names(),
            "indexed": {"bytes": self.series.done, "of": self.series.size, "files_left": self.groups.pending},
            "unreadable": dict(list(self.groups.unreadable.items())[:5]),
        }

    def curve(
        self, name: str, points: int, window: int = 1, low: float | None = None, high: float | None = None
    ) -> dict[str, Any]:
        """A metric between two steps in about `points` points, after a running mean over `window` steps."""
        steps, values = self.series.column(name)
        values = smooth(values, window)
        start = 0 if low is None else int(np.searchsorted(steps, low))
        end = len(steps) if high is None else int(np.searchsorted(steps, high, side="right"))
        drawn = thin(steps[start:end], values[start:end], points)
        return {
            "run": self.name,
            "metric": name,
            "steps": drawn.steps.tolist(),
            "values": [None if value != value else value for value in drawn.values.tolist()],
            "hidden": drawn.hidden,
            "not_finite": drawn.not_finite,
            "total": len(steps),
        }


class Library:
    """All runs that are shown; a thread of its own indexes what is new, a share of each run at a time."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = list(folders)
        self._runs: dict[str, RunView] = {}
        self._stop = threading.Event()
        self._asked = 0.0
        self._thread: threading.Thread | None = None
        self.find()

    def find(self) -> list[RunView]:
        """The runs there are now, also those that appeared since."""
        found = find_runs(self.folders)
        known = {run.path: run for run in self._runs.values()}
        for name, path in found.items():
            run = known.get(path) or RunView(name, path)
            run.name = name
            found_run = self._runs.get(name)
            if found_run is not run:
                self._runs = {**self._runs, name: run}
        self._runs = {name: run for name, run in self._runs.items() if name in found}
        return list(self._runs.values())

    def get(self, name: str) -> RunView:
        """The run of this name. RunFolderError when there is none: names never become paths."""
        if name not in self._runs:
            raise RunFolderError(f"There is no run {name!r} here.{did_you_mean(name, self._runs)}")
        return self._runs[name]

    def asked(self) -> None:
        """A reader waits for an answer."""
        self._asked = time.monotonic()

    def start(self, seconds: float = 1.0) -> None:
        """Index in the background until `stop`; look for new lines every `seconds`."""
        self._thread = threading.Thread(target=self._watch, args=(seconds,), name="covey-view", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, seconds: float) -> None:
        while not self._stop.is_set():
            done = []
            for run in self._runs.values():
                started = time.monotonic()
                done.append(run.refresh_some())
                if not done[-1] and started - self._asked < _POLITE_SECONDS:
                    self._stop.wait(time.monotonic() - started)
            if all(done):
                self._stop.wait(seconds)

    def refresh(self) -> None:
        """Index everything now."""
        for run in self.find():
            run.series.refresh()
            run.groups.refresh()


def differences(runs: Sequence[RunView]) -> list[dict[str, Any]]:
    """What differs between the manifests of the runs: `[{"name": "config.beta", "values": [0, 0.1]}]`; a source is text."""
    found = [run.manifest() for run in runs]
    if not found:
        return []
    names = sorted({name for other in found[1:] for name in _changed(found[0], other)})
    return [{"name": name, "values": [_at(one, name) for one in found]} for name in names]


def _changed(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return list(manifest.changes(first, other))


def _at(found: Any, name: str) -> Any:
    """The value under a dotted name; a key may hold dots itself."""
    if not name:
        return found
    if not isinstance(found, Mapping):
        return None
    for key in found:
        if name == key or name.startswith(f"{key}."):
            value = _at(found[key], name[len(key) + 1 :])
            if value is not None:
                return value
    return None


def _name_of(algorithm: Any) -> str | None:
    if isinstance(algorithm, Mapping):
        fields = algorithm.get("fields")
        inner = fields.get("name") if isinstance(fields, Mapping) else None
        name = algorithm.get("name") or inner or algorithm.get("type")
        return None if name is None else str(name)
    return None if algorithm is None else str(algorithm)
