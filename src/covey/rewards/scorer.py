"""`Scorer`: groups in, scored groups out, robust against errors and time-outs of reward functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from covey.errors import RewardError
from covey.rewards.builtin.registry import resolve
from covey.rewards.calling.caller import Caller
from covey.rewards.calling.deadline import EventLoop
from covey.rewards.calling.outcome import Outcome, logged_columns
from covey.rewards.calling.workers import INSIDE, isolated
from covey.rewards.combining import Combiner, WeightOption, is_moving, weight_of, within_float32
from covey.rewards.contract import Batch, RewardSpec, check, specs_of, takes
from covey.rewards.failures import Failures, with_scores
from covey.rewards.replaced import Calculate, Replaced
from covey.rewards.scales import Scale, Scales
from covey.rewards.surroundings import Leftovers, Surroundings, copied_state
from covey.types import Event, Group, Mean, Metric, Reward, Spread


class Scorer:
    """Scores the groups of a generation batch with every reward, one call for each reward.

    A completion has one of three outcomes for each reward: a score, an abstention (`None`, NaN) or an error. An exception, a
    time-out or a value that is not a finite number is an error: NaN in `Group.rewards`, an `Event` in `Group.events` with
    the traceback and the completion, and a count in `rewards/<name>/errors`. After `error_limit` calls in a row of which
    nothing came, RewardError. An error that no retry can mend (a wrong number of values, no numbers at all) raises RewardError
    on the first call already. `on_error="raise"` raises RewardError at the first error of any kind.

    Plain functions run one after the other on the caller's thread, where they can be interrupted; at the same
    time, `async def` ones on an event loop, those marked `in_thread` or `streams` in threads, `isolated` ones in worker
    processes (see `covey.rewards.reward`). With `workers`, functions of the user's own that a process can import are
    isolated without being marked, in so many processes each.
    `timeout_seconds` limits each call (see `covey.rewards.calling.deadline` for what can be interrupted; `None`: no limit).
    With `isolate`, a call that raises is repeated on halves of the batch, so that only the completions that make it
    raise are lost.
    """

    def __init__(
        self,
        rewards: Sequence[RewardSpec | Reward],
        weights: Sequence[WeightOption] | None = None,
        *,
        combiner: Combiner | None = None,
        timeout_seconds: float | None = 120.0,
        error_limit: int = 10,
        on_error: str = "record",
        isolate: bool = True,
        workers: int = 0,
        trainer_state: Callable[[], object] | None = None,
        calculate: Calculate | None = None,
    ) -> None:
        if INSIDE in os.environ:
            raise RewardError(
                "a worker process was about to train: it imports the script that holds the reward. Put what trains under "
                "`if __name__ == '__main__':`, or the reward into a file of its own."
            )
        self.rewards = specs_of(rewards, weights)
        self.combiner = combiner or Combiner()
        self.combiner.running = [Spread(0.0, 0.0, 0.0)] * len(self.rewards)
        self.weight_options: list[WeightOption] = list(weights or [spec.weight for spec in self.rewards])
        """Weights [R] as they were set: numbers, schedules or functions of the step."""
        self._weights = [weight_of(weight) for weight in self.weight_options]
        self.read: Callable[[Group], Group] = lambda group: group
        """Reader of chats: adds messages to their completions; the identity until the tokenizer is loaded."""
        self.timeout_seconds = timeout_seconds
        self.trainer_state = trainer_state or (lambda: None)
        self.check(None)
        self._loop = EventLoop()
        specs = [isolated(spec) for spec in self.rewards] if workers else self.rewards
        options: dict[str, Any] = {"isolate": isolate and on_error == "record", "workers": max(workers, 1)}
        self._callers = [Caller(spec, self._limit(spec), self._loop, **options) for spec in specs]
        self.replaced = None if calculate is None else Replaced(calculate, self.names)
        """Scores every batch in place of the rewards; it may ask them."""
        self._leftovers = Leftovers()
        self._scales = Scales([spec.how.scale if spec.scale is None else spec.scale for spec in self.rewards])
        self._failures = Failures(self.names, error_limit, on_error)

    @staticmethod
    def of(
        rewards: Any, weights: Sequence[WeightOption] | None = None, *, device: Any = None, **options: Any
    ) -> Scorer:
        """A scorer of names, import paths, callables and reward models, one or several; `options` as the constructor's.

        `device`: where reward models compute that have no device of their own.
        """
        several = list(rewards) if isinstance(rewards, list | tuple) else [rewards]
        return Scorer([resolve(reward, device=device) for reward in several], weights, **options)

    @property
    def names(self) -> list[str]:
        """The names that metrics carry, [R]."""
        return [spec.name for spec in self.rewards]

    @property
    def weights(self) -> Tensor:
        """[R] float32, at the optimizer step that training has reached."""
        step = getattr(self.trainer_state(), "global_step", 0)
        return torch.tensor([weight(step) for weight in self._weights], dtype=torch.float32)

    @property
    def scales(self) -> list[Scale | None]:
        """[R], the score of a wrong and that of a right completion; None where that is not known."""
        return self._scales.current

    def observe(self, groups: Sequence[Group]) -> list[Scale | None]:
        """Scales of the rewards, from the scored groups of all ranks: only values 0 and 1 so far mean a scale of 0 to 1."""
        self._scales.see(groups)
        return self.scales

    def check(self, columns: Iterable[str] | None) -> None:
        """Raise one sentence when a reward is not callable or needs something that the data set's `columns` do not have."""
        check(self.rewards, columns)

    def begin(self) -> Scoring:
        """Start a batch whose groups come one by one."""
        return Scoring(self, self._callers, self.trainer_state())

    def score(self, groups: Iterable[Group]) -> list[Group]:
        """The same groups with `rewards` [G, R], `events`, and `extras` from `log_extra`. No groups: no call, no groups."""
        scoring, added = self.begin(), []
        for group in groups:
            scoring.add(group)
            added.append(group)
        return scoring.finish(added)

    def calculated(self, inputs: Sequence[Mapping[str, Any]], *lists: Sequence[Any]) -> Tensor:
        """[N, R] scores of N completions: `lists` are prompts, completions and their ids, `inputs` the rows."""
        batch = Batch.of_rows(inputs, *lists)
        outcomes = self.begin().outcomes(batch)
        if self.replaced is not None:
            self.replaced.note(outcomes)
        return torch.stack([outcome.scores for outcome in outcomes], dim=-1)

    def checked(self, batch: Batch) -> Batch:
        """The batch, once it is known to hold what the rewards need."""
        if not self._failures.proven:
            self.check(batch.columns)
        return batch

    def settle(self, groups: Sequence[Group], outcomes: Sequence[Outcome], batch: Batch) -> list[Group]:
        """Update error counts, raise where the run must stop, and give each group its scores."""
        try:
            for outcome in outcomes:
                self._failures.account(outcome, batch)
        except RewardError as error:
            error.events = tuple(event for outcome in outcomes for _, event in outcome.events(batch))
            raise
        self._failures.warn_of_unscored(outcomes, batch)
        scores = torch.stack([outcome.scores for outcome in outcomes], dim=-1)  # [N, R]
        events = [event for outcome in outcomes for event in outcome.events(batch)]
        scores, more = within_float32(scores, self.weights, self.names, batch)
        scored = with_scores(groups, scores, outcomes, self.weights)
        return _attach(scored, [*events, *more], logged_columns(outcomes))

    def tidy(self, before: Surroundings) -> list[Event]:
        """Restore state that calls on other threads changed and cancel their tasks. Returns the events to report."""
        changed = [(caller.spec.name, what) for caller in self._callers for what in caller.changed]
        changed += [("", what) for what in before.put_back()]
        return self._leftovers.events(changed, self._loop.cancel_left())

    def check_first(self, agree: Callable[[bool], bool] = bool) -> None:
        """After the first batch: RewardError where a reward failed on every completion; `agree` as `Failures.check_first`."""
        self._failures.check_first(agree)

    def take_metrics(self) -> dict[str, Metric]:
        """Seconds, errors and the functions' own `log_metric` values since the last call of this."""
        taken, self._failures.metrics = self._failures.metrics, {}
        now = zip(self.names, self.weights.tolist(), self._weights, strict=True)
        moving = {f"rewards/{name}/weight": Mean(value, 1) for name, value, weight in now if is_moving(weight)}
        return taken | moving if taken else taken

    def close(self) -> None:
        """End the threads, the event loop and the worker processes that rewards started."""
        for caller in self._callers:
            caller.close()
        self._loop.close()

    def state_dict(self) -> dict[str, Any]:
        per_reward = {each.spec.name: each.portions.max_tokens for each in self._callers if each.portions}
        bounds = {name: bound for name, bound in per_reward.items() if bound is not None}
        counts = {"in_a_row": dict(self._failures.in_a_row)}
        held = {**counts, **self.combiner.state_dict(), "scales": self._scales.state_dict()}
        return {**held, "portions": bounds} if bounds else held

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._failures.load(state["in_a_row"])
        self._scales.load_state_dict(state.get("scales", {}))
        for caller in self._callers:
            if caller.portions:
                caller.portions.limit(state.get("portions", {}).get(caller.spec.name))
        if "running" in state:
            self.combiner.load_state_dict(state)

    def _limit(self, spec: RewardSpec) -> float | None:
        limit = spec.how.timeout_seconds if spec.timeout_seconds is None else spec.timeout_seconds
        return self.timeout_seconds if limit is None else limit


class Scoring:
    """One batch being scored: `add` groups as they finish, then `finish` with all of them in their order.

    Rewards that stream are called by `add`, concurrently with the caller; the others once, by `finish`. The
    result does not depend on the order in which groups were added.
    """

    def __init__(self, scorer: Scorer, callers: Sequence[Caller], trainer_state: object) -> None:
        self._scorer, self._callers = scorer, callers
        states = {caller: copied_state(trainer_state) for caller in callers if takes(caller.spec.call, "trainer_state")}
        self._states = [states.get(caller) for caller in callers]
        self._surroundings = Surroundings.now()
        self._started: dict[tuple[int, int], list[tuple[list[int], Future[Outcome]]]] = {}
        for caller in callers:
            caller.breaker.begin()

    def add(self, group: Group) -> None:
        """Start the rewards that stream on this group."""
        batch: Batch | None = None
        for index, caller in enumerate(self._callers):
            if caller.call_options.streams and group.size and self._scorer.replaced is None:
                batch = batch or self._scorer.checked(Batch.of([self._scorer.read(group)]))
                self._started[index, id(group)] = caller.submit(batch, self._states[index])

    def finish(self, groups: Sequence[Group]) -> list[Group]:
        """The same groups with `rewards` [G, R], `events` and `extras`; every one of them was added before."""
        if not any(group.size for group in groups):
            return [replace(group, rewards=torch.zeros(0, len(self._callers))) for group in groups]
        batch = self._scorer.checked(Batch.of([self._scorer.read(group) for group in groups]))
        if self._scorer.replaced is not None:
            return self._scorer.settle(groups, self._scorer.replaced(batch), batch)
        return self._scorer.settle(groups, self.outcomes(batch, groups), batch)

    def outcomes(self, batch: Batch, groups: Sequence[Group] | None = None) -> list[Outcome]:
        """Outcomes of each reward for the batch, that of `groups` (None: nothing was added before)."""
        waiting = [self._pieces(index, groups, batch) for index in range(len(self._callers))]
        outcomes = [
            self._callers[index].score(batch, self._states[index]) if pieces is None else None
            for index, pieces in enumerate(waiting)
        ]  # on this thread, while the others run concurrently
        collect = lambda pieces: [(places, future.result()) for places, future in pieces or ()]  # waits for them
        whole = [
            outcome or Outcome.joined(caller.spec.name, collect(pieces), len(batch))
            for caller, outcome, pieces in zip(self._callers, outcomes, waiting, strict=True)
        ]
        whole[0].notices += self._scorer.tidy(self._surroundings)
        return whole

    def _pieces(
        self, index: int, groups: Sequence[Group] | None, batch: Batch
    ) -> list[tuple[Sequence[int], Future[Outcome]]] | None:
        """Pending work on other threads: places in the batch and the future outcome; None: the reward runs on this thread."""
        caller = self._callers[index]
        if not caller.is_concurrent:
            return None
        if groups is None or not caller.call_options.streams:
            return list(caller.submit(batch, self._states[index]))
        pieces: list[tuple[Sequence[int], Future[Outcome]]] = []
        start = 0
        for group in groups:
            for places, future in self._started.get((index, id(group)), ()):
                pieces.append(([start + place for place in places], future))
            start += group.size
        return pieces


def _attach(groups: Sequence[Group], events: Sequence[tuple[int, Event]], extras: Mapping[str, Any]) -> list[Group]:
    """Each group with the events that concern it by their row, and its logged columns."""
    scored, start = [], 0
    for group in groups:
        stop = start + group.size
        concerning = tuple(event for row, event in events if start <= row < stop)
        logged = {column: values[start:stop] for column, values in extras.items()}
        scored.append(replace(group, events=group.events + concerning, extras={**group.extras, **logged}))
        start = stop
    return scored
