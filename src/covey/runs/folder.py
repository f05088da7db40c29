"""A run's own folder: one run in it, everything that happened in files that other tools read, nothing overwritten."""

from __future__ import annotations

import os
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
    output_dir,
    previews,
    rollouts,
    serialization,
    status,
    step_files,
    traces,
)
from covey.runs.lock import FolderLock, refuse_trespass
from covey.runs.metrics import JsonLines
from covey.runs.storage import ABSENT, is_absent, refusal, refuse_link
from covey.runs.weights import SAVED
from covey.types import Alert, Event, Group

Outcome = Literal["finished", "stopped", "failed"]
_MOST_BAD_STEPS = 20


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
        self._clock = time.time() - time.monotonic()
        self._refused: set[str] = set()
        self._is_closed = self._is_begun = False
        self._is_taken = False
        """True: another run has its place, and nothing of this one is written there any more."""
        self._run_json: dict[str, Any] = {}
        """`run.json` as it began; empty before `describe`."""

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close("finished" if kind is None else "failed")

    @staticmethod
    def create(path: str | os.PathLike[str], **options: Any) -> RunFolder:
        """The folder, made, locked for this process, and begun. `options`: those of `locked`."""
        run = RunFolder.locked(path, **options)
        try:
            run.begin()
        except BaseException:
            run._lock.release()
            raise
        return run

    @staticmethod
    def locked(
        path: str | os.PathLike[str], *, resume: Path | None = None, strict: bool = False, restarts: bool = False
    ) -> RunFolder:
        """The folder, made and locked for this process; what is there stays until `begin`, which `describe` calls.

        `resume`: the checkpoint to continue from. One in this folder continues its run, one elsewhere makes that run the parent of a
        new one. `strict`, for the command line, refuses a folder that holds another run or foreign files; `restarts` allows a run that
        ended before its first checkpoint. Raises RunFolderError in one sentence with the way out, before anything is touched.
        """
        folder = output_dir.checked(path)
        refuse_trespass(folder)
        if strict and not output_dir.is_inside(resume, folder):
            output_dir.refuse_occupied(folder, restarts)
        output_dir.make(folder)
        lock = FolderLock(folder)
        lock.take()
        try:
            checkpoint.clear_leftovers(folder)
            saved = (manifest.read(folder / manifest.NAME) or {}).get(SAVED) or {}
            return RunFolder(folder, lock, resume, saved)
        except BaseException:
            lock.release()
            raise

    def begin(self) -> None:
        """Go on with the run of a checkpoint in the folder: records of later steps go (they will be made again), later checkpoints are
        moved to `previous-N/`. Else move a run that is there to `previous-N/`, whole and with a warning, so that a script that runs
        twice loses nothing; foreign files stay. A second call does nothing.
        """
        if self._is_begun:
            return
        self._is_begun = True
        if output_dir.is_inside(self.resumed_from, self.path):
            self.rewind(self._step)
        elif output_dir.holds_run(self.path):
            output_dir.set_aside(self.path)

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
        self.begin()
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
            run_json |= {key: before[key] for key in ("id", "created", "parent", manifest.MOVED_TO) if key in before}
        run_json["parent"] = run_json.get("parent") or self._parent()
        if self._saved:
            run_json[SAVED] = {place: step if step <= self._step else -1 for place, step in self._saved.items()}
        # who ended well said so
        earlier = [{"state": "died", **earlier_attempt} for earlier_attempt in (before or {}).get("attempts", [])]
        run_json["attempts"] = [*earlier, attempt]
        run_json |= {"state": "running", "step": self._step}
        self._run_json = run_json
        self._try("run.json", lambda: manifest.write(self.path / manifest.NAME, run_json))
        return run_json

    @property
    def _logs(self) -> tuple[JsonLines, ...]:
        return self.metrics, self.events, self.alerts, self.evaluations

    def restore(self) -> None:
        """Make a folder that was deleted, moved or replaced in the middle of its run again: lock, `run.json` and logs, with one warning.

        Raises RunFolderError where another run is in its place.
        """
        if not self._is_closed and self._is_lost():
            self._try("the folder of the run", self._make_again)

    def _is_lost(self) -> bool:
        if self._lock.is_lost() or not self._run_json:
            return self._lock.is_lost()
        path = self.path / manifest.NAME
        return is_absent(path) or not (self._lock.is_held() or self._is_ours(manifest.read(path)))

    def _is_ours(self, run_json: Mapping[str, Any] | None) -> bool:
        """False for the `run.json` of another run, or of this one once another process has resumed it."""
        ours = self._run_json
        is_newer = run_json is not None and len(run_json.get("attempts") or []) > len(ours["attempts"])
        return run_json is None or (run_json.get("id") == ours["id"] and not is_newer)

    def _make_again(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        if not self._is_lost():  # a network disk was behind
            return
        try:
            place = self._lock.retake()
            run_json = manifest.read(self.path / manifest.NAME)
            if self._run_json and not self._is_ours(run_json):
                raise RunFolderError(f"{self.path} holds another run.")
        except RunFolderError as error:
            self._is_closed = self._is_taken = True
            self._lock.release()
            raise RunFolderError(
                f"Another run has begun in {self.path}, which was deleted, moved or replaced in the middle of this one, so this one ends "
                f"after step {self._step}. Resume it, in another output_dir, from the checkpoints that were moved away."
            ) from error
        for log in self._logs:
            log.restore()
        if place is not None and self._run_json:
            self._leave(place)
        if run_json is None and self._run_json:
            manifest.write(self.path / manifest.NAME, self._run_json)
        rest = "" if place is None else f" Everything else of it until then is in {place}."
        warnings.warn(
            f"{self.path} was deleted, moved or replaced, or its run.json or .lock, while its run goes on; after step {self._step} it has run.json "
            f"and its logs again.{rest}",
            stacklevel=5,
        )

    def _leave(self, place: Path) -> None:
        """Note where the folder was moved to in `run.json`, and in the one there that the run has stopped in it."""
        self._run_json[manifest.MOVED_TO] = str(place)
        theirs = manifest.read(place / manifest.NAME)
        if theirs is not None and theirs.get("attempts") and self._is_ours(theirs):
            self._try("run.json", lambda: manifest.write(place / manifest.NAME, self._ended(theirs, "stopped")))

    def _ended(self, run_json: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
        run_json["attempts"][-1] |= {"ended": manifest.now(), "to_step": self._step, "state": outcome}
        return run_json | {"state": outcome, "step": self._step}

    def append_metrics(self, step: int, logs: Mapping[str, Any], seconds: Mapping[str, float] | None = None) -> None:
        """One line of `metrics.jsonl`: the step, the time, the metrics, `seconds/<phase>`, and `clock_offset` once the clock was set."""
        self.restore()
        phases = {f"seconds/{name}": round(value, 6) for name, value in (seconds or {}).items()}
        offset = round(time.time() - time.monotonic() - self._clock, 3)
        clock = {"clock_offset": offset} if abs(offset) > 1 else {}
        self.metrics.append({"step": step, "time": round(time.time(), 3), **logs, **phases, **clock})
        self._step = max(self._step, step)

    def append_events(self, step: int, events: Sequence[Event]) -> None:
        """Events of this step (errors, dropped completions), one line each."""
        self.restore()
        for event in () if self._is_taken else events:
            details = manifest.to_json(event.details)
            self.events.append({"step": step, "kind": event.kind, "said": event.said, "details": details})

    def append_alert(self, alert: Alert) -> None:
        """Append one alert of the monitor to `alerts.jsonl`."""
        self.restore()
        line = {"step": alert.step, "rule": alert.rule, "severity": alert.severity, "said": alert.said}
        evidence = manifest.to_json(alert.evidence)
        if not self._is_taken:
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
        self.restore()
        self.evaluations.append({"step": step, "time": round(time.time(), 3), "set": name, **metrics})
        self._try("evaluations", lambda: evaluations.write(self.path / evaluations.FOLDER, step, name, rows))

    def close(self, outcome: Outcome = "finished") -> None:
        """Say in `run.json` how it ended, and let the folder go. A second call does nothing."""
        if self._is_closed:
            return
        try:
            self.restore()
            for log in self._logs:
                log.close()
            run_json = (manifest.read(self.path / manifest.NAME) if self._is_begun else None) or self._run_json
            if run_json.get("attempts"):
                self._try("run.json", lambda: manifest.write(self.path / manifest.NAME, self._ended(run_json, outcome)))
        except RunFolderError:
            if outcome != "failed":
                raise
        finally:
            self._is_closed = True
            self._lock.release()

    def _parent(self) -> dict[str, Any] | None:
        if self.resumed_from is None or output_dir.is_inside(self.resumed_from, self.path):
            return None
        theirs = manifest.read(self.resumed_from.parent / manifest.NAME) or {}
        return {"run": str(self.resumed_from.parent), "id": theirs.get("id"), "checkpoint": self.resumed_from.name}

    def write_bad_step(self, step: int, tree: Mapping[str, Any]) -> None:
        """`bad_steps/step-N/batch.*`: the batch of a step whose update was skipped; the first 20 of a run."""
        parent = self.path / output_dir.BAD_STEPS
        folder = parent / f"step-{step:06d}"
        if not folder.exists() and parent.is_dir() and len(list(parent.iterdir())) >= _MOST_BAD_STEPS:
            return
        self._try("bad_steps", lambda: _write_tree(folder, tree))

    def rewind(self, step: int, *, keep_events: bool = False) -> None:
        """Rewind to the step of a checkpoint: later checkpoints are moved away, later records are dropped and made again."""
        self._step = step
        later = [path for path in checkpoint.checkpoints(self.path) if checkpoint.step_of(path) > step]
        if later:
            target = output_dir.new_previous(self.path)
            for name in ("run.json", "metrics.jsonl"):
                if (self.path / name).is_file():
                    shutil.copyfile(self.path / name, target / name)
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
        if self._is_taken:
            return
        try:
            write()
        except (OSError, SafetensorError) as error:
            refused = refusal(error, what, self.path)
            if refused is None and not isinstance(error, ABSENT):
                raise
            sentence = refused or f"{what} could not be written: {error}."
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
