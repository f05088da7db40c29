"""Asynchronous checkpointing: a run pauses for a copy in memory; the disk is written in the background."""

import copy
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from covey.errors import InvariantError, RunFolderError, SpoiledError, StorageError
from covey.learner.soundness import expect_sound, parameter_names, saved_weights, state_fault, weight_fault
from covey.monitor.trackers import reads_checkpoints
from covey.process.cores import processes_here
from covey.process.lean import TrainerState
from covey.process.memory import free_memory
from covey.process.shard_files import FOLDER, shards_refused, taken_out
from covey.process.sharding import local
from covey.runs import checkpoint, serialization
from covey.runs.snapshot import Background, bytes_to_copy, weights_now
from covey.training.invariants import FrozenWeightsCheck, expect_adapter_reloads, expect_same_weights
from covey.training.parts import Parts
from covey.training.recording import callback_states, checkpoint_tree, weights_to_write, write_model
from covey.training.state import TrainState
from covey.types import Alert, Event

logger = logging.getLogger(__name__)

NO_CHECKPOINT_AFTER = (InvariantError, RunFolderError, SpoiledError, StorageError)
_ALERT_AFTER = 3
"""Consecutive failed saves before an alert."""


@dataclass(eq=False)
class Saver:
    """Saves the checkpoints of a run, one at a time.

    A disk error is reported once, as a warning and in `events.jsonl`; training goes on with the earlier checkpoints
    intact, and the next save tries again. Other errors in the background are raised at the next `poll`.
    """

    args: Any
    model: Any
    tokenizer: Any
    handler: Any
    """transformers.trainer_callback.CallbackHandler"""
    trainer_state: TrainerState
    when_written: Callable[[Path, int], None] = lambda path, step: None
    """Callback for each complete checkpoint (path, step), before another is started."""
    restore_folder: Callable[[], None] = lambda: None
    """Makes a run folder that was deleted or moved again; RunFolderError if another run has taken its place."""
    background: Background[Path | None] = field(default_factory=Background)
    watch: FrozenWeightsCheck | None = None
    """Frozen-weights check, set before the first step."""
    has_warned_tight: bool = False
    writing: int = 0
    """Step of the current or last checkpoint."""
    drawn: Mapping[str, Any] = field(default_factory=dict)
    """Position of the prompt stream in that checkpoint."""
    is_best: bool = False
    """True: that step's evaluation was the best when the write began, or while it went on."""
    failed: int = 0
    """Consecutive saves that failed with a disk error."""

    def save(self, parts: Parts, state: TrainState) -> None:
        """Save the current state of the run. Every process must call it; the main one writes.

        Raises SpoiledError on all of them, and writes nothing, if a weight or other state is not finite.
        """
        self.restore_folder()
        tree = {} if self.args.save_only_model else checkpoint_tree(parts, state)
        names = parameter_names(self.model, parts.learner.optimizer)
        fault = weight_fault(saved_weights(self.model)) or state_fault(tree, names)
        when = f"step {state.step}, no checkpoint is made of it"
        expect_sound(fault, when, anywhere=parts.world.any(fault is not None))
        expect_same_weights(self.model, parts.world)
        weights = weights_to_write(self.model, parts.world)
        if weights is not None:
            self._save_split(parts, state.step, tree, weights)
            return
        if not parts.world.is_main:
            return
        self.finish(parts)
        self._note(state.step, tree)
        waits = self._must_wait(bytes_to_copy(self.model, tree))
        work = self._work(tree, self._watch(parts).later(), copies=not waits)
        self.background.start(work, name=f"covey-checkpoint-{state.step}")
        if waits:
            self.finish(parts)

    def _note(self, step: int, tree: dict[str, Any]) -> None:
        self.trainer_state.stateful_callbacks = callback_states(self.handler)  # type: ignore[assignment]
        self.writing, self.drawn = step, tree.get("prompts", {})
        self.is_best = step == self.trainer_state.best_global_step

    def _save_split(self, parts: Parts, step: int, tree: dict[str, Any], weights: dict[str, Any]) -> None:
        """Save a run with a sharded model: each process writes its shards into the folder that the main one stages, and all must see.

        `weights`: full weights on the main process.
        """
        world = parts.world
        tree, split = taken_out(tree)
        waits = (
            self._must_wait(sum(local(value).nbytes for value in split.values()) * processes_here())
            or not world.can_post
        )
        if not world.any(waits):
            self._save_split_in_background(parts, step, tree, split, weights)
            return
        if not world.is_main:
            folder = world.broadcast("")
            if folder and split and (refused := shards_refused(split, Path(folder) / FOLDER)):
                logger.error("This process's part of the checkpoint could not be written: %s", refused)
            return
        self.finish(parts)
        self._note(step, tree)
        announced: list[str] = []

        def write_parts(folder: Path) -> None:
            announced.append(world.broadcast(str(folder)))
            if split and (refused := shards_refused(split, folder / FOLDER)):
                raise refused

        work = self._work(tree, self._watch(parts).later(), copies=False, weights=weights, more=write_parts)
        try:
            self._ended(parts, work)
        finally:
            if not announced:
                world.broadcast("")

    def _save_split_in_background(
        self, parts: Parts, step: int, tree: dict[str, Any], split: dict[str, Any], weights: dict[str, Any]
    ) -> None:
        """Save a run with a sharded model from copies in host memory, on a thread of each process."""
        from covey.process.part_saves import PartSave

        self.finish(parts)
        part, name = PartSave(split, parts.world), f"covey-checkpoint-{step}"
        if not parts.world.is_main:
            self.background.start(part.follow, name=name)
            return
        try:
            self._note(step, tree)
            self._watch(parts).later()()  # now: FSDP swaps the weights while training goes on
            work = self._work(serialization.snapshot(tree), lambda: None, copies=False, weights=weights, more=part.lead)
        except BaseException:
            part.cancel()
            raise

        def lead() -> Path:
            try:
                return work()
            finally:
                part.cancel()

        self.background.start(lead, name=name)

    def _must_wait(self, size: int) -> bool:
        """True if a save of copies of so many bytes has to wait for the disk."""
        return not self.args.save_async or any(map(reads_checkpoints, self.handler.callbacks)) or self._is_tight(size)

    def _is_tight(self, size: int) -> bool:
        """True if a copy of so many bytes might exhaust host memory; warns once."""
        free = free_memory()
        if free is None or size < 0.8 * free:
            return False
        if not self.has_warned_tight:
            logger.warning(
                "A copy for saving beside training takes %.1f GB and %.1f GB of memory are free, so this save waits for the disk; "
                "save_async=False always does.",
                size / 1e9,
                free / 1e9,
            )
        self.has_warned_tight = True
        return True

    def poll(self, parts: Parts) -> None:
        """Handle the result of a finished write, without waiting."""
        if parts.world.is_main:
            self.is_best |= self.writing == self.trainer_state.best_global_step  # evaluated since its write began
            self._watch(parts)
            if not self.background.is_busy:
                self.finish(parts)

    def _watch(self, parts: Parts) -> FrozenWeightsCheck:
        if self.watch is None:
            self.watch = FrozenWeightsCheck(parts.learner)
            self.watch.later()()
        return self.watch

    def finish(self, parts: Parts) -> None:
        """Wait for the current write."""
        self._ended(parts, self.background.finish)

    def _mark_best(self) -> None:
        """Name the checkpoint of the best evaluation, which may have come after it was written, or while a better one came."""
        steps = [*([self.writing] if self.is_best else []), self.trainer_state.best_global_step]
        for path in (Path(str(self.args.output_dir)) / f"checkpoint-{step}" for step in steps):
            if path.is_dir():
                self.trainer_state.best_model_checkpoint = str(path)

    def _ended(self, parts: Parts, write: Callable[[], Path | None]) -> None:
        """Handle the result of a write."""
        try:
            path = write()
        except StorageError as error:
            self._refused(parts, error)
            return
        if path is not None:
            self.failed = 0
            parts.prompts.commit(self.drawn)
            self.when_written(path, checkpoint.step_of(path))
        self._mark_best()

    def _refused(self, parts: Parts, error: StorageError) -> None:
        """Report a disk error of a save, as an alert after several in a row. Raises it again at `save_error_limit`."""
        self.failed += 1
        logger.error("%s Training goes on; the next save tries again.", error)
        parts.session.recorder.event(self.writing, Event(kind="save_failed", said=str(error)))
        if self.failed == _ALERT_AFTER:
            sentence = f"{self.failed} saves in a row failed, so a crash would lose everything since the newest checkpoint: {error}"
            parts.session.monitor.tell(
                Alert(
                    rule="saves_failing",
                    severity="error",
                    said=sentence,
                    step=self.writing,
                    evidence={"failed": self.failed},
                    try_this=(
                        "make room on the disk, or a lower save_total_limit",
                        "save_error_limit ends the run instead",
                    ),
                )
            )
        if self.args.save_error_limit is not None and self.failed >= self.args.save_error_limit:
            raise StorageError(
                f"{self.failed} saves in a row failed (save_error_limit={self.args.save_error_limit}), the last: {error}"
            ) from error

    def _work(
        self,
        tree: Any,
        look: Callable[[], None],
        *,
        copies: bool,
        weights: dict[str, Any] | None = None,
        more: Callable[[Path], None] = lambda folder: None,
    ) -> Callable[[], Path]:
        """Function that writes the current checkpoint (from copies if training goes on meanwhile) and `more`."""
        best, run_dir = self.trainer_state.best_global_step, Path(str(self.args.output_dir))
        trainer_state = replace(self.trainer_state, log_history=list(self.trainer_state.log_history))
        trainer_state.stateful_callbacks = copy.deepcopy(trainer_state.stateful_callbacks)
        if best == self.writing:
            trainer_state.best_model_checkpoint = str(run_dir / f"checkpoint-{best}")
        at_best = run_dir / f"checkpoint-{best}"  # which has none if it was between two saves
        marked = at_best if best == self.writing or at_best.is_dir() else self.trainer_state.best_model_checkpoint
        weights = weights_now(self.model) if copies else weights

        def both(folder: Path) -> None:
            more(folder)
            _write(look, self.model, weights, self.tokenizer, trainer_state, folder)

        return partial(
            checkpoint.save,
            run_dir,
            self.writing,
            both,
            serialization.snapshot(tree) if copies else tree,
            keep=self.args.save_total_limit,
            best=None if best is None or marked is None else str(marked),
        )


def _write(
    look: Callable[[], None], model: Any, weights: Any, tokenizer: Any, trainer_state: TrainerState, folder: Path
) -> None:
    look()
    write_model(folder, model, tokenizer, weights)
    expect_adapter_reloads(model, folder, weights)
    write_trainer_state(folder / "trainer_state.json", trainer_state)


def write_trainer_state(path: Path, trainer_state: TrainerState) -> None:
    """Write transformers' `trainer_state.json`, an entry of the log a line.

    Every checkpoint holds the whole log; transformers' `save_to_json` copies it deeply and takes eight times as long.
    """
    text = json.dumps(asdict(replace(trainer_state, log_history=[])), indent=2, sort_keys=True)
    head, name, tail = text.partition('\n  "log_history": [')  # no text within JSON has a line break
    entries = ",".join("\n    " + json.dumps(entry, sort_keys=True) for entry in trainer_state.log_history)
    path.write_text(f"{head}{name}{entries}{tail}\n", encoding="utf-8")
