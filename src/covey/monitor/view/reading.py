"""Data of the page, read from run folders while they grow."""

import hashlib
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from covey.errors import RunFolderError, did_you_mean
from covey.evaluation import intervals
from covey.evaluation.compare import run_data as comparison
from covey.evaluation.compare import sides
from covey.monitor.view import about_run
from covey.monitor.view.groups import GroupIndex, columns_of
from covey.monitor.view.latest import Latest
from covey.monitor.view.prompts import PromptIndex
from covey.monitor.view.records import Records, alert_of, event_of, is_step, text_of
from covey.monitor.view.samples import Samples
from covey.monitor.view.series import SeriesIndex
from covey.runs import evaluations, manifest, status

_METRIC = re.compile(r"(?P<set>eval.*?)_(?:reward|rewards/(?P<reward>.+)/mean)")
_MOST_STEPS = 400


class HeldOut:
    """Intervals of a run's held-out means, by metric and step; each file is read once, while it stays the same."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._files: dict[tuple[str, int], Latest[Mapping[str, intervals.Estimate]]] = {}

    @property
    def unreadable(self) -> dict[str, str]:
        """Files that could not be read and still cannot, and why."""
        with self._lock:
            files = [file for file in self._files.values() if file.last.trouble]
        return {f"{file.path.parent.name}/{file.path.name}": why for file in files if (why := file.read().trouble)}

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
        with self._lock:
            file = self._files.get((name, step))
            if file is None:
                if len(self._files) >= _MOST_STEPS:
                    self._files.clear()
                file = Latest(evaluations.path_of(self.folder, name, step), _estimates, depth=3)
                self._files[name, step] = file
        return file.read().content or {}


def _estimates(file: BinaryIO) -> Mapping[str, intervals.Estimate]:
    """Intervals of the rewards of an evaluation's file."""
    table = columns_of(file)
    rows = table.to_pylist()
    rewards = [column for column in table.column_names if column == "reward" or column.startswith("reward/")]
    return {column: intervals.mean_reward(list(evaluations.by_question(rows, column).values())) for column in rewards}


_SHARE = 16 << 20
"""Bytes of one run's metrics that are indexed before another run has its turn."""
_FIRST_SHARE = 1 << 20
"""Little, so that there is soon something to show."""
_FILES_AT_ONCE = 50
_POLITE_SECONDS = 0.15
"""Seconds after a request in which indexing yields half of the CPU time to requests."""
_LONGEST_NAME = 200
_SHOWN = (
    "reward", "eval_reward", "frac_reward_zero_std", "kl", "entropy", "completions/mean_length", "loss",
    "step_time",
)  # fmt: skip


class RunView:
    """One run: its indexes and its small files. No content of its folder makes a method raise or block."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.series = SeriesIndex(path / "metrics.jsonl")
        self.evaluated = SeriesIndex(path / evaluations.LOG)
        self.held_out = HeldOut(path / evaluations.FOLDER)
        self.groups = GroupIndex(path / "rollouts")
        self.prompts = PromptIndex(self.groups)
        self.samples = Samples(self.groups)
        self.alerts = Records(path / "alerts.jsonl", alert_of)
        self.events = Records(path / "events.jsonl", event_of)
        self.family: str | None = None
        """The same for runs that differ in their seed alone; None while that is not known."""
        self._family_of: Any = None
        self._failed: str | None = None
        self._id: str | None = None
        self._run_json = Latest(path / manifest.NAME, manifest.load_opened)

    def is_replaced(self) -> bool:
        """True if the folder holds another run than the one that is indexed: `run.json` names another `id`."""
        now = text_of((self._run_json.read().content or {}).get("id")) or None
        self._id = self._id or now
        return now not in (None, self._id)

    def refresh_some(self) -> bool:
        """Index a share of the new records. True if nothing is left."""
        try:
            done = self.series.refresh(_SHARE if self.series.done else _FIRST_SHARE)
            done = self.evaluated.refresh(_SHARE) and done
            done = self.groups.refresh(_FILES_AT_ONCE) and done
            if not self.groups.pending:
                self.prompts.refresh()
            self._find_family()
        except Exception as error:  # noqa: BLE001 -- a run that cannot be read must not stop the others
            self._failed = f"It cannot be read ({type(error).__name__}: {str(error)[:200]})."
            return True
        self._failed = None
        return done

    def manifest(self) -> dict[str, Any]:
        """`run.json`, with the state that the run really is in; the state alone where it cannot be read."""
        run_json = self._run_json.read().content or {}
        return run_json | {
            "state": status.state_of(run_json, self.path)[:_LONGEST_NAME] if _has_text(run_json, "state") else "unknown"
        }

    def _find_family(self) -> None:
        now = self._run_json.read()
        if now.mark == self._family_of:
            return
        self._family_of = now.mark
        try:
            key = sides.key_of(comparison.Run(path=self.path, manifest=now.content)) if now.content else None
        except (TypeError, ValueError, AttributeError, KeyError, RecursionError):  # a foreign shape has no family
            key = None
        self.family = None if key is None else hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def troubles(self) -> list[str]:
        """Parts of the run that cannot be read, a sentence each."""
        run_json = self._run_json.read().trouble
        logs = (self.series, self.evaluated, self.groups, self.alerts, self.events)
        sentences = [run_json and f"run.json cannot be read: {run_json}.", *(log.trouble for log in logs), self._failed]
        files = {**self.groups.unreadable, **self.held_out.unreadable}
        sentences += [f"{name} cannot be read: {why.rstrip('.')}." for name, why in list(files.items())[:3]]
        if len(files) > 3:
            sentences.append(f"{len(files) - 3} more files cannot be read.")
        return [sentence for sentence in sentences if sentence]

    def overview(self) -> dict[str, Any]:
        """One row of the table of runs."""
        try:
            return self._overview()
        except Exception as error:  # noqa: BLE001 -- a run that cannot be read must not hide the others
            sentence = f"It cannot be shown ({type(error).__name__}: {str(error)[:200]})."
            empty = dict.fromkeys(("created", "algorithm", "parent", "family", "id", *about_run.FIELDS))
            indexed = {"bytes": 0, "of": 0, "files_left": 0}
            about = {"name": self.name, "path": str(self.path), "state": "unknown", "step": 0, "alerts": 0, **empty}
            return {**about, "last": dict.fromkeys(_SHOWN), "metrics": [], "indexed": indexed, "troubles": [sentence]}

    def _overview(self) -> dict[str, Any]:
        run_json = self.manifest()
        alerts = self.alerts.rows()
        step = run_json.get("step")
        parent = run_json.get("parent")
        names = sorted({*self.series.names(), *self.evaluated.names()})
        return {
            "name": self.name,
            "path": str(self.path),
            "state": run_json["state"],
            "created": run_json["created"][:40] if _has_text(run_json, "created") else None,
            "step": self.series.last_step() or (step if is_step(step) else 0),
            "algorithm": text_of(manifest.name_of(run_json.get("algorithm")))[:_LONGEST_NAME] or None,
            "parent": text_of(parent.get("run")) or None if isinstance(parent, Mapping) else None,
            "family": self.family,
            "alerts": len(alerts),
            "last": {name: self.last(name) for name in _SHOWN},
            "metrics": names,
            "id": text_of(run_json.get("id")) or None,
            **about_run.about(run_json, self.path, names, self.column),
            "indexed": {"bytes": self.series.done, "of": self.series.size, "files_left": self.groups.pending},
            "troubles": self.troubles(),
        }

    def last(self, name: str) -> float | None:
        """The newest finite value of a metric."""
        values = self.column(name)[1]
        finite = np.flatnonzero(np.isfinite(values))
        return float(values[finite[-1]]) if len(finite) else None

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps [n] and values [n] of a metric of training, else of an evaluation; of two at one step the later."""
        steps, values = self.series.column(name)
        if not len(steps):
            steps, values = self.evaluated.column(name)
        is_last = np.append(steps[1:] != steps[:-1], True)[: len(steps)]
        return steps[is_last], values[is_last]


def _has_text(run_json: Mapping[str, Any], name: str) -> bool:
    return isinstance(run_json.get(name), str)


class Library:
    """All runs that are shown; a background thread indexes new records, a share of each run at a time."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = list(folders)
        self._runs: dict[str, RunView] = {}
        self._stop = threading.Event()
        self._finding = threading.Lock()
        self._last_request = 0.0
        self._thread: threading.Thread | None = None
        self.find()

    def find(self) -> list[RunView]:
        """The runs there are now, also those that appeared since."""
        paths = find_runs(self.folders)
        with self._finding:
            by_path = {run.path: run for run in self._runs.values()}
            runs = {}
            for name, path in paths.items():
                before = by_path.get(path)
                runs[name] = RunView(name, path) if before is None or before.is_replaced() else before
                runs[name].name = name
            self._runs = runs
        return list(runs.values())

    def get(self, name: str) -> RunView:
        """The run of this name. RunFolderError when there is none: names never become paths."""
        run = self._runs.get(name)
        if run is not None and run.is_replaced():
            self.find()
            run = self._runs.get(name)
        if run is None:
            raise RunFolderError(f"There is no run {name!r} here.{did_you_mean(name, self._runs)}")
        return run

    def touch(self) -> None:
        """A reader waits for an answer."""
        self._last_request = time.monotonic()

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
                if not done[-1] and started - self._last_request < _POLITE_SECONDS:
                    self._stop.wait(time.monotonic() - started)
            if all(done):
                self._stop.wait(seconds)

    def refresh(self) -> None:
        """Index everything now."""
        for run in self.find():
            while not run.refresh_some():
                continue


def differences(runs: Sequence[RunView]) -> list[dict[str, Any]]:
    """Differences between the manifests of the runs: `[{"name": "config.beta", "values": [0, 0.1]}]`; a source is text."""
    entries = [manifest.compared(run.manifest()) for run in runs]
    rows = [{"name": name, "values": [of.get(name) for of in entries]} for name in sorted(set().union(*entries))]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


_MARKS = ("run.json", "metrics.jsonl", "rollouts")
_DEPTH = 2


def find_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """Every run in or below the folders (two levels deep), by a short name that no two of them share.

    A folder is a run when it holds `run.json`, `metrics.jsonl` or `rollouts/`; a run's own folders are not looked into.
    """
    paths = {path.resolve(): None for folder in folders for path in _below(folder.resolve(), _DEPTH)}
    return _name(list(paths))


def _below(folder: Path, depth: int) -> list[Path]:
    try:
        if any(os.path.lexists(folder / mark) for mark in _MARKS):
            return [folder]
        if depth == 0:
            return []
        inner = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.is_dir())
    except OSError:  # a folder that may not be looked into, or is gone
        return []
    return [run for path in inner for run in _below(path, depth - 1)]


def _name(paths: Sequence[Path]) -> dict[str, Path]:
    """Names of runs: the shortest suffixes of their paths that are unique."""
    named: dict[str, Path] = {}
    left, parts = list(paths), 1
    while left:
        counts = Counter(_tail(path, parts) for path in paths)
        is_longest = parts > max(len(path.parts) for path in left)
        named |= {_tail(path, parts): path for path in left if is_longest or counts[_tail(path, parts)] == 1}
        left = [path for path in left if not is_longest and counts[_tail(path, parts)] > 1]
        parts += 1
    return named


def _tail(path: Path, parts: int) -> str:
    name = "/".join(path.parts[-parts:])
    return os.fsencode(name).decode("utf-8", "backslashreplace")  # a browser knows no other
