"""A run's own folder: one run in it, everything that happened in files that other tools read, nothing overwritten."""

from __future__ import annotations

import os
import re
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from covey.errors import RunFolderError
from covey.runs import (
    checkpoint,
    checksums,
    completions,
    evaluations,
    manifest,
    previews,
    rollouts,
    serialization,
    status,
    step_files,
    traces,
)
from covey.runs.lock import FolderLock, refuse_trespass
from covey.runs.metrics import JsonLines, read
from covey.runs.storage import refusal, refuse_link
from covey.runs.weights import SAVED
from covey.types import Alert, Event, Group

Outcome = Literal["finished", "stopped", "failed"]
BAD_STEPS = "bad_steps"
_MOST_BAD_STEPS = 20
_RECORDS = (
    *("run.json", "train.yaml", "metrics.jsonl", "events.jsonl", "alerts.jsonl", "rollouts", traces.FOLDER),
    *(evaluations.LOG, evaluations.FOLDER, BAD_STEPS, completions.FOLDER),
    "runs",  # TensorBoard's, as transformers names it
)
_CHECKPOINT = re.compile(r"checkpoint-\d+(\..*)?")
_HARMLESS = re.compile(r"\..*|previous-\d+|.*\.(log|out|err)")
"""Foreign files that may be in a run's folder: hidden files, earlier runs, logs of a scheduler."""


class RunFolder:
    """Folder of one run: `run.json`, `metrics.jsonl`, `events.jsonl`, `alerts.jsonl`, `rollouts/`, `checkpoint-N/`.

    Made by `RunFolder.create`. A record that cannot be written is a warning; training continues.
    """

    def __init__(
        self, path: Path, lock: FolderLock, resumed_from: Path | None = None, saved: Mapping[str, int] | None = None
    ) -> None:
        """`saved`: steps of the models that are in the folder already (`weights.SAVED`)."""
        self.path, self._saved = path, dict(saved or {})
        self.resumed_from = resumed_from
        """The checkpoint that training continues from."""
        self.metrics = JsonLines(path / "metrics.jsonl")
        self.events = JsonLines(path / "events.jsonl")
        self.alerts = JsonLines(path / "alerts.jsonl")
        self.evaluations = JsonLines(path / evaluations.LOG)
        self._lock = lock
        self._step = 0 if resumed_from is None else int(checksums.read(resumed_from)["step"])
        self._refused: set[str] = set()
        self._is_closed = False

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close("finished" if kind is None else "failed")

    @staticmethod
    def create(
        path: str | os.PathLike[str], *, resume: Path | None = None, strict: bool = False, restarts: bool = False
    ) -> RunFolder:
        """The folder, made and locked for this process.

        `resume`: the checkpoint to continue from. One in this folder continues its run: records of later steps go (they
        will be made again), later checkpoints are moved to `previous-N/`. One elsewhere makes that run the parent of a
        new one. Without it, a run that is already there is moved to `previous-N/`, whole and with a warning, so a script that runs
        twice loses nothing; foreign files stay where they are.
        `strict`, for the command line, refuses a folder that holds another run or foreign files; `restarts` allows a run that
        ended before its first checkpoint.
        Raises RunFolderError in one sentence with the way out, before anything is touched.
        """
        folder = _check(path)
        refuse_trespass(folder)
        resumes_here = resume is not None and resume.resolve().parent == folder.resolve()
        if strict and not resumes_here:
            _refuse_occupied(folder, restarts)
        _make(folder)
        lock = FolderLock(folder)
        lock.take()
        try:
            checkpoint.clear_leftovers(folder)
            saved = (manifest.read(folder / manifest.NAME) or {}).get(SAVED) or {}
            if not resumes_here and _holds_run(folder):
                _set_aside(folder)
            run = RunFolder(folder, lock, resume, saved)
            if resumes_here:
                run.rewind(run._step)
        except BaseException:
            lock.release()
            raise
        return run

    def describe(
        self,
        *,
        args: Any,
        algorithm: Any = None,
        rewards: Sequence[Any] = (),
        reward_weights: Sequence[Any] = (),
        dataset: Any = None,
        model: Any = None,
    ) -> dict[str, Any]:
        """Write `run.json` and return it. `args` is the resolved config: a mapping, or an object with `to_dict()`.

        After a resume, the run keeps its identity, and the new attempt says what changed (options, versions, source).
        """
        config = args.to_dict() if hasattr(args, "to_dict") else dict(args)
        run_json = manifest.describe(
            config=config, algorithm=algorithm, rewards=rewards, reward_weights=reward_weights, dataset=dataset,
            folder=self.path, model=model,
        )  # fmt: skip
        before = manifest.read(self.path / manifest.NAME)
        attempt: dict[str, Any] = {"started": manifest.now(), "from_step": self._step, "process": os.getpid()}
        attempt["process_mark"] = status.mark_of(os.getpid())
        attempt |= {"host": run_json["hardware"]["host"], "command": run_json["command"]}
        if before is not None:
            attempt["changed"] = manifest.changes(before, run_json)
            run_json |= {key: before[key] for key in ("id", "created", "parent") if key in before}
        run_json["parent"] = run_json.get("parent") or self._parent()
        if self._saved:
            run_json[SAVED] = {place: step if step <= self._step else -1 for place, step in self._saved.items()}
        # who ended well said so
        earlier = [{"state": "died", **earlier_attempt} for earlier_attempt in (before or {}).get("attempts", [])]
        run_json["attempts"] = [*earlier, attempt]
        run_json |= {"state": "running", "step": self._step}
        self._try("run.json", lambda: manifest.write(self.path / manifest.NAME, run_json))
        return run_json

    def append_metrics(self, step: int, logs: Mapping[str, Any], seconds: Mapping[str, float] | None = None) -> None:
        """One line of `metrics.jsonl`: the step, the time, the metrics, and `seconds/<phase>`."""
        phases = {f"seconds/{name}": round(value, 6) for name, value in (seconds or {}).items()}
        self.metrics.append({"step": step, "time": round(time.time(), 3), **logs, **phases})
        self._step = max(self._step, step)

    def append_events(self, step: int, events: Sequence[Event]) -> None:
        """Events of this step (errors, dropped completions), one line each."""
        for event in events:
            details = manifest.to_json(event.details)
            self.events.append({"step": step, "kind": event.kind, "said": event.said, "details": details})

    def append_alert(self, alert: Alert) -> None:
        """Append one alert of the monitor to `alerts.jsonl`."""
        line = {"step": alert.step, "rule": alert.rule, "severity": alert.severity, "said": alert.said}
        evidence = manifest.to_json(alert.evidence)
        self.alerts.append({**line, "evidence": evidence, "try_this": list(alert.try_this)})

    def write_rollouts(
        self,
        step: int,
        groups: Sequence[Group],
        reward_names: Sequence[str],
        *,
        limit: int | None = None,
        with_previews: bool = True,
        **options: Any,
    ) -> None:
        """`rollouts/step-N.parquet`; `options` as in `rollouts.table_of`. `limit`: most files that stay (`rollouts.thin`).

        `with_previews`: small copies of prompts' images, sounds and videos too.
        """
        folder = self.path / "rollouts"

        def write() -> None:
            rollouts.write(folder, step, groups, reward_names, **options)
            if with_previews:
                previews.write(folder, groups)
            if limit is not None:
                rollouts.thin(folder, limit)

        self._try("rollouts", write)

    def write_completions(self, step: int, groups: Sequence[Group], reward_names: Sequence[str]) -> None:
        """`completions/completions_N.parquet`, as TRL writes it with `log_completions`."""
        folder = self.path / completions.FOLDER
        self._try("completions", lambda: completions.write(folder, step, groups, reward_names))

    def write_evaluation(
        self, step: int, name: str, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]]
    ) -> None:
        """One line of `evaluations.jsonl`, and every answer's rewards in `evaluations/<name>/`."""
        self.evaluations.append({"step": step, "time": round(time.time(), 3), "set": name, **metrics})
        self._try("evaluations", lambda: evaluations.write(self.path / evaluations.FOLDER, step, name, rows))

    def close(self, outcome: Outcome = "finished") -> None:
        """Say in `run.json` how it ended, and let the folder go. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            for log in (self.metrics, self.events, self.alerts, self.evaluations):
                log.close()
            run_json = manifest.read(self.path / manifest.NAME)
            if run_json is not None and run_json.get("attempts"):
                run_json["attempts"][-1] |= {"ended": manifest.now(), "to_step": self._step, "state": outcome}
                run_json |= {"state": outcome, "step": self._step}
                self._try("run.json", lambda: manifest.write(self.path / manifest.NAME, run_json))
        finally:
            self._lock.release()

    def _parent(self) -> dict[str, Any] | None:
        if self.resumed_from is None or self.resumed_from.resolve().parent == self.path.resolve():
            return None
        theirs = manifest.read(self.resumed_from.parent / manifest.NAME) or {}
        return {"run": str(self.resumed_from.parent), "id": theirs.get("id"), "checkpoint": self.resumed_from.name}

    def write_bad_step(self, step: int, tree: Mapping[str, Any]) -> None:
        """`bad_steps/step-N/batch.*`: the batch of a step whose update was skipped; the first 20 of a run."""
        parent = self.path / BAD_STEPS
        folder = parent / f"step-{step:06d}"
        if not folder.exists() and parent.is_dir() and len(list(parent.iterdir())) >= _MOST_BAD_STEPS:
            return
        self._try("bad_steps", lambda: _write_tree(folder, tree))

    def rewind(self, step: int, *, keep_events: bool = False) -> None:
        """Rewind to the step of a checkpoint: later checkpoints are moved away, later records are dropped and made again."""
        self._step = step
        later = [path for path in checkpoint.checkpoints(self.path) if checkpoint.step_of(path) > step]
        if later:
            target = _previous(self.path)
            for name in ("run.json", "metrics.jsonl"):
                if (self.path / name).is_file():
                    shutil.copy2(self.path / name, target / name)
            for path in later:
                os.rename(path, target / path.name)
            warnings.warn(
                f"{self.path} goes on from step {step}; {len(later)} later checkpoint(s) are now in {target.name}/.",
                stacklevel=3,
            )
        event_logs = () if keep_events else (self.events, self.alerts)
        for log in (self.metrics, *event_logs):
            log.truncate_to(step)
        rollouts.truncate_to(self.path / "rollouts", step)
        for others in (completions, traces):
            step_files.truncate_to(self.path / others.FOLDER, step, others.FILES)
        self.drop_evaluations(step + 1)

    def drop_evaluations(self, step: int) -> None:
        """Remove the evaluations of `step` and later."""
        self.evaluations.truncate_to(step - 1)
        evaluations.truncate_to(self.path / evaluations.FOLDER, step - 1)

    def _try(self, what: str, write: Any) -> None:
        """Write a record; a disk that refuses is logged once, until it works again."""
        try:
            write()
        except (OSError, SafetensorError) as error:
            sentence = refusal(error, what, self.path)
            if sentence is None:
                raise
            if what not in self._refused:
                warnings.warn(f"{sentence} Training goes on without this record.", stacklevel=3)
            self._refused.add(what)
        else:
            self._refused.discard(what)


def _write_tree(folder: Path, tree: Mapping[str, Any]) -> None:
    refuse_link(folder.parent)
    refuse_link(folder)
    folder.mkdir(parents=True, exist_ok=True)
    serialization.write(tree, folder / "batch")


def _check(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    if not text or "\0" in text:
        raise RunFolderError(f"output_dir {text!r} is not the path of a folder; give one such as runs/first.")
    return Path(text).expanduser()


def expect_usable(path: str | os.PathLike[str], resume: Path | None, restarts: bool) -> None:
    """Raise what `RunFolder.create(strict=True)` would raise, and make nothing."""
    folder = _check(path)
    refuse_trespass(folder)
    if resume is None or resume.resolve().parent != folder.resolve():
        _refuse_occupied(folder, restarts)
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise RunFolderError(f"output_dir {folder} is a file; give the path of a folder.")
    _refuse_unwritable(there)


def _refuse_unwritable(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RunFolderError(f"output_dir {folder} cannot be written to; choose another, or change its permissions.")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise RunFolderError(f"output_dir {folder} is a file; give the path of a folder.") from error
    except OSError as error:
        raise RunFolderError(f"output_dir {folder} cannot be made ({error.strerror}); choose another.") from error
    _refuse_unwritable(folder)


def _holds_run(folder: Path) -> bool:
    """True if the folder holds metrics, rollouts or a checkpoint. A run that failed at start-up has none."""
    if not os.path.isdir(folder):  # False, not an error, for a name that is too long
        return False
    has_metrics = (folder / "metrics.jsonl").is_file() and bool(read(folder / "metrics.jsonl"))
    return has_metrics or (folder / "rollouts").is_dir() or any(map(_is_checkpoint, folder.iterdir()))


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and _CHECKPOINT.fullmatch(path.name) is not None


def _refuse_occupied(folder: Path, restarts: bool) -> None:
    if _holds_run(folder):
        steps = [row["step"] for row in read(folder / "metrics.jsonl") if isinstance(row.get("step"), int)]
        steps += [checkpoint.step_of(path) for path in checkpoint.checkpoints(folder)]
        is_begun = bool(max(steps, default=0)) or (folder / "rollouts").is_dir()
        if not is_begun or (restarts and not checkpoint.checkpoints(folder)):
            return
        raise RunFolderError(
            f"{folder} holds a run already (step {max(steps, default=0)}); go on with it with --resume auto, "
            "or choose another --output-dir."
        )
    names = sorted(path.name for path in folder.iterdir()) if os.path.isdir(folder) else []
    foreign = [name for name in names if name not in _RECORDS and not _HARMLESS.fullmatch(name)]
    if foreign:
        shown = ", ".join(foreign[:3]) + (" ..." if len(foreign) > 3 else "")
        raise RunFolderError(
            f"{folder} holds files that are not a run's ({shown}); choose an empty or a new folder as --output-dir."
        )


def _previous(folder: Path) -> Path:
    """A new `previous-N` in the folder."""
    number = 1
    while (folder / f"previous-{number}").exists():
        number += 1
    target = folder / f"previous-{number}"
    target.mkdir()
    return target


def _set_aside(folder: Path) -> None:
    target = _previous(folder)
    for path in list(folder.iterdir()):
        if path.name in _RECORDS or _is_checkpoint(path):
            os.rename(path, target / path.name)
    warnings.warn(
        f"{folder} held a run already; it is now in {target}, and a new one starts. To go on with it instead, "
        "resume from its checkpoint; to keep the two apart, give another output_dir.",
        stacklevel=3,
    )
