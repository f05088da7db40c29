"""The training loop: prompts, rollout, rewards, advantages, update, new weights to the sampler."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from covey.data import PromptStream
from covey.errors import NumericsError, RewardError
from covey.learner.update_guard import is_left_out
from covey.process.interruption import StopNow
from covey.process.memory import collecting_new_garbage_only
from covey.rewards import Scoring, advantage_shares, has_signal, reward_metrics
from covey.rollout import Drawing, Drawn, Sampler, SamplingParams, sampler_metrics
from covey.runs import rng
from covey.training.agents import tool_metrics
from covey.training.ahead import next_prompts, order_ahead, staleness, used
from covey.training.credit import completion_metrics, outcomes, with_advantages, with_greedy_rewards
from covey.training.ensembles import asked_again, own, rescued, taught
from covey.training.interleaving import Steps
from covey.training.own_endpoint import branched
from covey.training.parts import Parts
from covey.training.prompts import take
from covey.training.recovery import after_spoiled, after_step, expect_sound_end
from covey.training.state import TrainState
from covey.types import Group, Mean, Prompt

WAITING = "waiting"
"""Phase in which other runs of this process were advanced; not part of a step's time."""


def run(parts: Parts, state: TrainState) -> Steps[TrainState]:
    """Train until `parts.total_steps`, or until the session asks to stop. Yields after every step and before drawing."""
    with collecting_new_garbage_only():
        return (yield from train_steps(parts, state))


def train_steps(parts: Parts, state: TrainState) -> Steps[TrainState]:
    parts.sampler.load(parts.learner.policy.model, version=state.step)
    while state.step < parts.total_steps and not parts.session.should_stop:
        started = time.perf_counter()
        try:
            if not state.pending:
                with undone_when_stopped(parts):
                    state = yield from roll_out(parts, state)
            state = train_step(parts, state, started)
        except StopNow:  # the session saves the state after the last complete step
            break
        except NumericsError as error:
            state = after_spoiled(parts, state, error)
        yield None
    return state


def train_step(parts: Parts, state: TrainState, started: float) -> TrainState:
    """One optimizer step on the next batch of a rollout, with logs and saves; `started`: start time of the step.

    Raises SpoiledError when training must roll back.
    """
    order_ahead(parts, state)
    batch, waiting = state.popped()
    algorithm = parts.algorithm.resolve(state.controllers)
    seconds = dict(state.rollout_seconds)
    with timed(seconds, "learn"), undone_when_stopped(parts):
        report = parts.learner.step(batch, algorithm, state.step + 1)
    with timed(seconds, "learn"):
        parts.learner.reference.mix(parts.learner.policy, alpha=algorithm.reference(report))
    report = report.merged({**state.rollout_metrics, **staleness(parts, batch, state.step)})
    seconds["step"] = time.perf_counter() - started - seconds.pop(WAITING, 0.0)
    report = replace(report, seconds=seconds, events=(*report.events, *(e for g in batch for e in g.events)))
    is_lost = is_left_out(report.events)  # its metrics would make an adaptive coefficient NaN
    controllers = state.controllers if is_lost else parts.algorithm.advance(state.controllers, report)
    state = waiting.advanced(report, controllers, drop_pending=algorithm.has_left(report))
    if parts.average is not None and not is_lost:
        parts.average.update(state.step)
    parts.sampler.load(parts.learner.policy.model, version=state.step)
    parts.session.record(state, batch, report)
    state = after_step(parts, state, batch, report)
    if state.step >= parts.total_steps or parts.session.should_stop:
        expect_sound_end(parts, state)
    return state


def roll_out(parts: Parts, state: TrainState) -> Steps[TrainState]:
    """Sample, score and add advantages to the completions of the next optimizer steps."""
    seconds: dict[str, float] = {}
    algorithm = parts.algorithm.resolve(state.controllers)
    with rewound_on_failure(parts.prompts):
        prompts = next_prompts(parts, state)
        drawn = groups = yield from answered(parts, state, prompts, seconds)
        for _ in range(parts.dynamic_sampling):
            if dull := sum(not has_signal(group, parts.scorer.weights) for group in groups):
                more = yield from answered(parts, state, take(parts.prompts, dull, state.set_aside), seconds)
                drawn, groups = [*drawn, *more], with_signal_first([*groups, *more], parts)
        with timed(seconds, "learn"):
            groups = parts.learner.annotate(branched(groups), algorithm)
            parts.session.monitor.begin(own(groups))
        if algorithm.needs.greedy:
            groups = with_greedy(parts, groups)
        scaled = parts.scorer.combiner(groups)
        groups = with_advantages(groups, algorithm, parts.scorer.weights, scaled)
        with timed(seconds, "learn"):
            groups, contributions = taught(parts, groups)
    scales, mine = parts.scorer.observe(drawn), own(groups)
    metrics = {
        **reward_metrics(own(drawn), parts.scorer.names, parts.scorer.weights, scales),
        "groups/drawn": Mean(len(drawn), 1),
        **advantage_shares(scaled, parts.scorer.names, parts.scorer.weights),
        **parts.world.merge({**parts.scorer.take_metrics(), **sampler_metrics(parts.sampler)}),
        **completion_metrics(mine),
        **tool_metrics([one for group in mine for one in group.completions]),
        **parts.session.monitor.measure(mine, parts.scorer.weights, scales),
        **contributions,
        **used(parts),
    }
    if not parts.has_rewards:
        metrics = {name: value for name, value in metrics.items() if name.startswith(("completions/", "policy/"))}
    batches = split(groups, parts.batches_per_rollout, seed=parts.seed + state.num_rollouts)
    return state.queued(batches * parts.num_iterations, metrics, seconds)


def answered(
    parts: Parts, state: TrainState, prompts: Sequence[Prompt], seconds: dict[str, float]
) -> Steps[list[Group]]:
    """The prompts with their scored completions, in their order."""
    sampling, sampler = parts.sampling_for(state.num_rollouts), parts.ensemble or parts.sampler
    with timed(seconds, WAITING):
        drawn = yield Drawing(sampler, parts.world.share(prompts), parts.num_generations, sampling)
    scoring = parts.scorer.begin()  # streaming rewards score a group while others are decoded
    with timed(seconds, "rollout"):
        groups = draw(parts, sampler, prompts, parts.num_generations, sampling, scoring.add, drawn)
    if drawn is not None:
        seconds["rollout"] += drawn.seconds
        seconds[WAITING] -= drawn.seconds
    with timed(seconds, "reward"):
        groups = score(parts, groups, scoring)
    if parts.ensemble is not None:
        groups = with_rescues(parts, groups, sampling, seconds)
    groups = parts.world.interleave(groups)
    parts.prompts.learn(outcomes(own(groups), parts.scorer.weights))
    return groups


def with_rescues(
    parts: Parts, groups: Sequence[Group], sampling: SamplingParams, seconds: dict[str, float]
) -> list[Group]:
    """This process's groups, with correct answers of the ensemble's rescuers where all the policy's failed."""
    with timed(seconds, "rollout"):
        answers = asked_again(parts, groups, sampling)
    with timed(seconds, "reward"):
        return rescued(parts, groups, score(parts, answers, added(parts.scorer.begin(), answers)))


def added(scoring: Scoring, groups: Sequence[Group]) -> Scoring:
    for group in groups:
        scoring.add(group)
    return scoring


def with_signal_first(groups: Sequence[Group], parts: Parts) -> list[Group]:
    """Groups of a rollout, preferring those with differing rewards: DAPO's dynamic sampling, with a bounded number of draws.

    Yu et al. 2025, section 3.2, <https://arxiv.org/abs/2503.14476>.
    """
    ranked = sorted(groups, key=lambda group: not has_signal(group, parts.scorer.weights))
    return ranked[: parts.prompts_per_rollout]


def draw(
    parts: Parts,
    sampler: Sampler,
    prompts: Sequence[Prompt],
    n: int,
    sampling: SamplingParams,
    each: Callable[[Group], None],
    drawn: Drawn | None = None,
) -> list[Group]:
    """Groups for this process's share of the prompts, in the order of the prompts; `drawn` if they are drawn already.

    `each` is called with every group as soon as it is finished.
    """
    mine = parts.world.share(prompts)
    place = {prompt.uid: i for i, prompt in enumerate(mine)}
    groups = []
    with parts.interruption.together():
        for group in sampler.sample(mine, n, sampling) if drawn is None else drawn.groups:
            each(group)
            groups.append(group)
    return sorted(groups, key=lambda group: place[group.prompt.uid])


def with_greedy(parts: Parts, groups: Sequence[Group]) -> list[Group]:
    """The groups with the rewards of each prompt's greedy answer, for estimators that use it as baseline (ReMax)."""
    greedy = replace(parts.sampling, temperature=0.0)
    scoring = parts.scorer.begin()
    answers = draw(parts, parts.sampler, [group.prompt for group in groups], 1, greedy, scoring.add)
    return with_greedy_rewards(groups, parts.world.interleave(score(parts, answers, scoring)))


def score(parts: Parts, groups: Sequence[Group], scoring: Scoring) -> list[Group]:
    """Scored groups. A reward error that ends the run on one process ends it on all, so that none hangs."""
    failed: RewardError | None = None
    scored: list[Group] = []
    try:
        scored = [without_columns(group) for group in scoring.finish(groups)]
    except RewardError as error:
        failed = error
    if parts.world.any(failed is not None):
        raise failed or RewardError("a reward failed on another process; its message is in that process's log.")
    parts.scorer.check_first(parts.world.any)
    return scored


def without_columns(group: Group) -> Group:
    """The group without the completions' columns, which only rewards need, such as environments, which cannot be pickled."""
    if not any(one.columns for one in group.completions):
        return group
    return replace(group, completions=tuple(replace(one, columns={}) for one in group.completions))


def split(groups: Sequence[Group], parts: int, seed: int) -> list[list[Group]]:
    """The completions of a rollout in `parts` equal batches, with groups kept whole if the sizes allow it."""
    if parts == 1:
        return [list(groups)]
    order = random.Random(seed).sample(range(len(groups)), len(groups))
    if len(groups) % parts == 0:
        size = len(groups) // parts
        return [[groups[i] for i in order[p * size : (p + 1) * size]] for p in range(parts)]
    places = [(i, g) for i in order for g in range(groups[i].size)]
    size = -(-len(places) // parts)
    batches = []
    for start in range(0, len(places), size):
        members: dict[int, list[int]] = {}
        for i, g in places[start : start + size]:
            members.setdefault(i, []).append(g)
        batches.append([groups[i].take(indices) for i, indices in members.items()])
    return batches


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
    """Context that a stop signal may abort at any token or micro-batch; its effects are then undone."""
    before = rng.snapshot()
    try:
        with parts.interruption.armed():
            yield
    except StopNow:
        parts.learner.forget()
        rng.restore(before)
        raise


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - started
