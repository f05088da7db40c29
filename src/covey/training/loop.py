"""The training loop: prompts, sampler, rewards, stages, advantages, update, new weights to the sampler."""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import TypeVar, cast

from covey.errors import NumericsError
from covey.process.interruption import StopNow
from covey.process.memory import collecting_new_garbage_only
from covey.training.credit import judged_groups, outcomes, rollout_metrics, with_signal_first, without_signal
from covey.training.drawing import split, through, timed
from covey.training.parts import Parts
from covey.training.recovery import after_spoiled, after_step, expect_sound_end, rewound_on_failure, undone_when_stopped
from covey.training.state import TrainState
from covey.types import Group, Prompt, of_policy

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Generator of a run, which yields after every optimizer step."""


def to_the_end(steps: Steps[T]) -> T:
    """Exhaust a generator. Returns its return value."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            return cast(T, ended.value)


def run(parts: Parts, state: TrainState) -> Steps[TrainState]:
    """Train until `parts.total_steps`, or until the session asks to stop. Yields after every step."""
    with collecting_new_garbage_only() as freeze_new:
        return (yield from train_steps(parts, state, freeze_new))


def train_steps(parts: Parts, state: TrainState, freeze_new: Callable[[], None]) -> Steps[TrainState]:
    parts.sampler.load(parts.learner.policy.model, version=state.step)
    parts.check_sampler()
    while state.step < parts.total_steps and not parts.session.should_stop:
        started = time.perf_counter()
        try:
            if not state.pending:
                with undone_when_stopped(parts):
                    state = roll_out(parts, state)
            state = train_step(parts, state, started)
        except StopNow:  # the session saves the state after the last complete step
            break
        except NumericsError as error:
            state = after_spoiled(parts, state, error)
        freeze_new()
        yield
    return state


def roll_out(parts: Parts, state: TrainState) -> TrainState:
    """Sample, score and add advantages to the completions of the next optimizer steps."""
    seconds: dict[str, float] = {}
    algorithm = parts.algorithm.resolve(state.controllers)
    scorer, stages, position = parts.scorer, parts.stages, state.position
    with rewound_on_failure(parts.prompts):
        prompts = parts.supply.next_prompts(parts.prompts_per_rollout, state.set_aside)
        drawn = groups = draw(parts, state, prompts, seconds)
        for _ in range(parts.dynamic_sampling):
            if dull := sum(without_signal(groups, scorer, algorithm)):
                prompts = parts.supply.further_prompts(dull, state.set_aside)
                more = draw(parts, state, prompts, seconds)
                drawn = [*drawn, *more]
                groups = with_signal_first([*groups, *more], scorer, algorithm)[: parts.prompts_per_rollout]
        groups = through(stages.before_advantages, groups, position, seconds)
        with timed(seconds, "learn"):
            groups = parts.learner.annotate(groups, algorithm)
            parts.session.monitor.anchor.begin(of_policy(groups))
        scaled = scorer.combiner(groups)
        groups, memory = judged_groups(groups, algorithm, scorer.weights, scaled)
        groups = through(stages.after_advantages, groups, position, seconds)
    metrics = rollout_metrics(parts, drawn, groups, scaled)
    batches = split(groups, parts.batches_per_rollout, seed=parts.seed + state.num_rollouts)
    return state.queued(batches * parts.num_iterations, metrics, seconds, memory)


def draw(parts: Parts, state: TrainState, prompts: Sequence[Prompt], seconds: dict[str, float]) -> list[Group]:
    """The prompts' scored groups of all processes, in the order of the prompts."""
    groups = parts.draws(prompts, parts.num_generations, parts.sampling_for(state.num_rollouts), seconds)
    groups = through(parts.stages.after_rewards, groups, state.position, seconds)
    groups = parts.world.interleave(groups)
    parts.prompts.learn(outcomes(groups, parts.scorer, parts.algorithm))
    return groups


def train_step(parts: Parts, state: TrainState, started: float) -> TrainState:
    """One optimizer step on the next batch of a rollout, with logs and saves; `started`: start time of the step.

    Raises SpoiledError when training must roll back.
    """
    seconds = dict(state.rollout_seconds)
    algorithm = parts.algorithm.resolve(state.controllers)
    batch = through(parts.stages.before_update, state.pending[0], state.position, seconds)
    with timed(seconds, "learn"), undone_when_stopped(parts):
        report = parts.learner.step(batch, algorithm, state.step + 1)
    with timed(seconds, "learn"):
        parts.learner.follow(algorithm, report)
    report = report.merged({**state.rollout_metrics, **parts.stages.update_metrics()})
    seconds["step"] = time.perf_counter() - started
    report = replace(report, seconds=seconds, events=(*report.events, *(e for g in batch for e in g.events)))
    state = state.advanced(report, parts.algorithm, drop_pending=algorithm.has_left(report))
    if parts.average is not None and not report.skips_update:
        parts.average.update(state.step)
    parts.sampler.load(parts.learner.policy.model, version=state.step)
    parts.session.record(state, batch, report)
    state = after_step(parts, state, batch, report)
    if state.step >= parts.total_steps or parts.session.should_stop:
        expect_sound_end(parts, state)
    return state
