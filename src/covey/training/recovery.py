"""Recovery from NaN, infinities and spikes: the batch is saved for study, and the run rolls back to a good checkpoint."""

import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.data import PromptStream
from covey.data.stream import row_key
from covey.errors import CheckpointError, NumericsError, SpoiledError
from covey.learner import lower_rates
from covey.learner.soundness import expect_sound, saved_weights, weight_fault
from covey.process import rng
from covey.process.interruption import StopNow
from covey.runs import checkpoint, checksums, serialization
from covey.training.parts import Parts
from covey.training.recording import restore_history, restore_tree
from covey.training.state import TrainState
from covey.types import Event, Group, Prompt, StepReport

logger = logging.getLogger(__name__)


@contextmanager
def rewound_on_failure(prompts: PromptStream) -> Iterator[None]:
    """Context that restores the position of the prompt stream after an exception."""
    position = prompts.state_dict()
    try:
        yield
    except BaseException:
        prompts.load_state_dict(position)
        raise


@contextmanager
def undone_when_stopped(parts: Parts) -> Iterator[None]:
    """Context that a stop signal may abort at any token or micro-batch; its effects are then undone, in rewards too."""
    before, of_rewards = rng.snapshot(), copy.deepcopy(parts.scorer.state_dict())
    try:
        with parts.interruption.armed():
            yield
    except StopNow:
        parts.learner.forget()
        rng.restore(before)
        parts.scorer.load_state_dict(of_rewards)
        raise


@contextmanager
def evaluation_undone_when_stopped(parts: Parts) -> Iterator[None]:
    """Context of an evaluation that a stop signal may abort; what it changed in records is then undone too."""
    recorder = parts.session.recorder
    before = copy.deepcopy(recorder.state_dict())
    try:
        with undone_when_stopped(parts), parts.interruption.evaluating():
            yield
    except StopNow:
        recorder.load_state_dict(before)
        raise


def after_step(parts: Parts, state: TrainState, batch: Sequence[Group], report: StepReport) -> TrainState:
    """State to continue from: the current one, or an earlier checkpoint's if the guard or an alert requests a rollback.

    The batch of a skipped update is written to `bad_steps/`. Raises NumericsError if the run must stop.
    """
    if report.skips_update:
        parts.session.recorder.bad_step(report.step, batch, report)
    guard, session = parts.learner.guard, parts.session
    roll_back_reason, session.roll_back_because = session.roll_back_because, None
    if parts.world.any(roll_back_reason is not None):
        return roll_back(parts, state, why=roll_back_reason or "another process asked for it.", before=state.step)
    move = guard.next_action(report.step, state.bad_steps, state.roll_backs, report.events)
    if move == "go_on":
        return state
    sentence = next(event.said for event in report.events if event.skips_update)
    return roll_back(parts, state, why=sentence, set_aside=[group.prompt for group in batch])


def after_spoiled(parts: Parts, state: TrainState, error: NumericsError) -> TrainState:
    """State of the newest good checkpoint, after weights became NaN, which skipping updates cannot repair.

    Raises SpoiledError with `on_bad_numbers='stop'`, after `roll_backs_limit` rollbacks, and without a checkpoint; raises
    `error` itself if the weights are finite.
    """
    if not isinstance(error, SpoiledError):
        fault = weight_fault(saved_weights(parts.learner.policy.model))
        if fault is None:
            raise error
        error = SpoiledError(f"{fault}: {error}")
    policy = parts.learner.guard.policy
    parts.learner.forget()
    parts.session.recorder.event(state.step, Event(kind="spoiled", said=str(error)))
    if policy.on_bad_numbers == "stop":
        raise SpoiledError(f"{error} on_bad_numbers='stop' ends the run here.") from error
    if state.roll_backs >= policy.roll_backs_limit:
        raise SpoiledError(f"{error} The run ends after {state.roll_backs} returns to a checkpoint.") from error
    try:
        return roll_back(parts, state, why=str(error), before=state.step + 1)
    except NumericsError as none:
        raise SpoiledError(str(none)) from error


def expect_sound_end(parts: Parts, state: TrainState) -> None:
    """Raise SpoiledError on every process unless the final weights of a run are finite."""
    fault = weight_fault(saved_weights(parts.learner.policy.model))
    expect_sound(fault, f"after step {state.step}", anywhere=parts.world.any(fault is not None))


def roll_back(
    parts: Parts,
    state: TrainState,
    *,
    why: str,
    set_aside: Iterable[Prompt] = (),
    before: int | None = None,
) -> TrainState:
    """Roll back to the newest verified checkpoint of this run from before the bad steps. Returns the state to continue from.

    Everything is restored as on a resume: weights, optimizer, data, random generators, logs. The run's `roll_back_learning_rate`
    then multiplies the learning rate and its schedule; the prompts of `set_aside` are not drawn again. `before`: the checkpoint
    must be of an earlier step (None: older than the last consecutive skipped updates). Raises NumericsError when there is no
    such checkpoint. Every process must call it.
    """
    guard, session = parts.learner.guard, parts.session
    last = state.step - state.bad_steps if before is None else before - 1
    session.finish_saving()
    run_dir = Path(session.args.output_dir)
    newest = parts.world.broadcast(newest_good(run_dir, last, state.roll_backs) if parts.world.is_main else None)
    if newest is None:
        raise NumericsError(
            f"{why} There is no good checkpoint of step {last} or before to go back to; save more often."
        )
    restored = restore_tree(parts, newest)
    restore_history(session, newest)
    rate = guard.policy.roll_back_learning_rate
    factor = rate * rate ** (state.roll_backs - restored.roll_backs)
    lower_rates(parts.learner.optimizer, parts.learner.scheduler, factor)
    aside = dict.fromkeys([*state.set_aside, *restored.set_aside, *(row_key(prompt) for prompt in set_aside)])
    restored = replace(restored, roll_backs=state.roll_backs + 1, bad_steps=0, set_aside=tuple(aside))
    sentence = (
        f"Back from step {state.step} to {newest.name}, with the learning rate times {factor:g}"
        + (f" and {len(aside)} prompt(s) set aside" if aside else "")
        + f": {why}"
    )
    logger.warning("%s", sentence)
    details = {"from_step": state.step, "to_step": restored.step, "factor": factor, "set_aside": list(aside)}
    session.recorder.rewind(restored.step, Event(kind="rolled_back", said=sentence, details=details))
    parts.sampler.load(parts.learner.policy.model, version=restored.step)
    session.resume_from(restored)
    return restored


def newest_good(run_dir: Path, last: int, roll_backs: int = 0) -> Path | None:
    """The newest checkpoint up to step `last` with correct checksums and a state to resume from.

    A checkpoint from before the run's last rollback (of `roll_backs`) was used already, and bad numbers came again before another
    was saved. It may contain the cause, because a ratio explodes after the update that caused it. So the next older one is
    used, if there is one.
    """
    tried = None
    for path in reversed(checkpoint.checkpoints(run_dir)):
        if checkpoint.step_of(path) > last or checksums.problems(path) or not (tree := checkpoint.load_state(path)):
            continue
        if tried is not None or tree["state"]["roll_backs"] >= roll_backs:
            return path
        tried = path
    return tried


def bad_batch(folder: Path) -> tuple[list[Group], dict[str, Any]]:
    """Groups of a skipped step, bitwise equal, and its record. `folder`: `bad_steps/step-N`."""
    tree = serialization.read(folder / "batch")
    if not isinstance(tree, dict) or "groups" not in tree:
        raise CheckpointError(
            f"{folder} does not hold the batch of a step; give a folder such as bad_steps/step-000012."
        )
    return list(tree["groups"]), {name: value for name, value in tree.items() if name != "groups"}
