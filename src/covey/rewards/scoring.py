"""`Scorer`: groups in, scored groups out, whatever the user's functions do."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from covey.errors import ConfigError, RewardError
from covey.rewards.builtin import resolve
from covey.rewards.contract import Batch, Logged, RewardSpec, arguments, check_signature, is_async, name_of
from covey.rewards.deadline import EventLoop, call_within
from covey.rewards.outcome import Outcome, describe, evaluate
from covey.types import Group, Mean, Metric, Reward, Sum, merge_metrics

logger = logging.getLogger(__name__)


class Scorer:
    """Scores the groups of a generation batch with every reward, one call for each reward.

    A completion has one of three outcomes for each reward: a score, an abstention (`None`, NaN) or an error. An exception, a
    time-out or a value that is not a finite number is an error: NaN in `Group.rewards`, an `Event` in `Group.events` with
    the traceback and the completion, and a count in `rewards/<name>/errors`. After `error_limit` calls in a row of which
    nothing came, RewardError. What no retry can mend (a wrong number of values, no numbers at all) raises RewardError
    on the first call already. `on_error="raise"` raises RewardError at the first error of any kind.

    Functions run one after the other on the caller's thread, `async def` ones meanwhile on an event loop.
    `timeout_seconds` limits each call (see `covey.rewards.deadline` for what can be interrupted; `None`: no limit).
    With `isolate`, a call that raises is repeated on halves of the batch, so that only the completions that make it
    raise are lost.
    """

    def __init__(
        self,
        rewards: Sequence[RewardSpec | Reward],
        weights: Sequence[float] | None = None,
        *,
        timeout_seconds: float | None = 120.0,
        error_limit: int = 10,
        on_error: str = "record",
        isolate: bool = True,
        trainer_state: Callable[[], Any] | None = None,
    ) -> None:
        if on_error not in ("record", "raise"):
            raise ConfigError(f"on_reward_error is {on_error!r}; use 'record' or 'raise'.")
        if error_limit < 1:
            raise ConfigError(f"reward_error_limit is {error_limit}; use at least 1.")
        self.rewards = _specs(rewards, weights)
        self.timeout_seconds = timeout_seconds
        self.error_limit = error_limit
        self.on_error = on_error
        self.isolate = isolate
        self.trainer_state = trainer_state or (lambda: None)
        self.check(None)
        self._loop = EventLoop()
        self._metrics: dict[str, Metric] = {}
        self._in_a_row = {spec.name: 0 for spec in self.rewards}
        self._proven: set[str] = set()
        self._has_warned = False

    @staticmethod
    def of(rewards: Any, weights: Sequence[float] | None = None, **options: Any) -> Scorer:
        """A scorer of names, import paths, callables and reward models, one or several; `options` as the constructor's."""
        several = list(rewards) if isinstance(rewards, list | tuple) else [rewards]
        return Scorer([resolve(reward) for reward in several], weights, **options)

    @property
    def names(self) -> list[str]:
        """The names that metrics carry, [R]."""
        return [spec.name for spec in self.rewards]

    @property
    def weights(self) -> Tensor:
        """[R] float32."""
        return torch.tensor([spec.weight for spec in self.rewards], dtype=torch.float32)

    def check(self, columns: Iterable[str] | None) -> None:
        """Raise one sentence when a reward is not callable or needs something that the data set's `columns` do not have."""
        known = None if columns is None else list(columns)
        for spec in self.rewards:
            check_signature(spec, known)

    def score(self, groups: Iterable[Group]) -> list[Group]:
        """The same groups with `rewards` [G, R], `events`, and `extras` from `log_extra`. No groups: no call, no groups."""
        groups = list(groups)
        if not any(group.size for group in groups):
            return [replace(group, rewards=torch.zeros(0, len(self.rewards))) for group in groups]
        batch = Batch.of(groups)
        if not self._proven:
            self.check(batch.columns)
        outcomes = self._run_all(batch)
        for outcome in outcomes:
            self._account(outcome)
        self._warn_of_unscored(outcomes, batch)
        return _attach(groups, outcomes, batch)

    def take_metrics(self) -> dict[str, Metric]:
        """Seconds, errors and the functions' own `log_metric` values since the last call of this."""
        taken, self._metrics = self._metrics, {}
        return taken

    def close(self) -> None:
        """Stop the event loop, if an `async def` reward started it."""
        self._loop.close()

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": dict(self._in_a_row)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._in_a_row |= {name: count for name, count in state["in_a_row"].items() if name in self._in_a_row}

    def _warn_of_unscored(self, outcomes: Sequence[Outcome], batch: Batch) -> None:
        """Say once that there are completions that every reward abstained from or failed on."""
        unscored = torch.stack([outcome.scores for outcome in outcomes]).isnan().all(0).nonzero().flatten().tolist()
        if not unscored or self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "%d of %d completions got no score from any reward and do not count, the first of them an answer to %r; "
            "`rewards/unscored` in the metrics counts them from now on.",
            len(unscored),
            len(batch),
            str(batch.prompts[unscored[0]])[:200],
        )

    def _run_all(self, batch: Batch) -> list[Outcome]:
        state = self.trainer_state()
        calls = [_Call(spec, state, self._limit(spec), self._loop) for spec in self.rewards]
        for call in calls:
            call.start(batch)  # coroutines run while the functions below do
        outcomes: dict[int, Outcome] = {}
        for index in sorted(range(len(calls)), key=lambda i: calls[i].is_async):
            call = calls[index]
            isolate = self.isolate and self.on_error == "record"
            outcome = evaluate(call.spec.name, call, batch, seconds=call.limit, isolate=isolate)
            outcome.seconds = call.seconds
            outcomes[index] = outcome
        return [outcomes[index] for index in range(len(calls))]

    def _limit(self, spec: RewardSpec) -> float | None:
        return self.timeout_seconds if spec.timeout_seconds is None else spec.timeout_seconds

    def _account(self, outcome: Outcome) -> None:
        """Count what happened; raise where the run must stop."""
        name, failures = outcome.name, outcome.failures
        broken = [failure.error for failure in failures if isinstance(failure.error, RewardError)]
        if broken and name not in self._proven:
            raise broken[0]
        if failures and self.on_error == "raise":
            error = failures[0].error
            raise RewardError(f"reward {name!r} raised {describe(error)} (on_reward_error is 'raise').") from error
        metrics: dict[str, Metric] = {f"rewards/{name}/seconds": Mean(outcome.seconds, 1)}
        if failures:
            metrics[f"rewards/{name}/errors"] = Sum(outcome.num_failed)
        said = [{key: Mean(value, 1)} for key, value in outcome.metrics]
        self._metrics = merge_metrics([self._metrics, metrics, *said])
        self._in_a_row[name] = self._in_a_row[name] + 1 if outcome.is_lost else 0
        if not outcome.is_lost:
            self._proven.add(name)
        if self._in_a_row[name] >= self.error_limit:
            error = failures[-1].error
            raise RewardError(
                f"reward {name!r} failed {self._in_a_row[name]} calls in a row, the last with {describe(error)}; "
                "fix the function and resume, or raise the limit of failures."
            ) from error


class _Call:
    """One reward during one call of `score`: how to call it on any part of the batch, and the time that took."""

    def __init__(self, spec: RewardSpec, trainer_state: Any, limit: float | None, loop: EventLoop) -> None:
        self.spec, self.trainer_state, self.limit, self.loop = spec, trainer_state, limit, loop
        self.is_async = is_async(spec.call)
        self.seconds = 0.0
        self._started: tuple[Future[Any], Logged] | None = None

    def start(self, batch: Batch) -> None:
        """Start a coroutine function on the whole batch; the first call of this object then waits for it."""
        if self.is_async:
            logged = Logged(len(batch))
            self._started = (self._on_loop(arguments(self.spec.call, batch, logged, self.trainer_state)), logged)

    def __call__(self, part: Batch) -> tuple[Any, Logged]:
        if self._started is not None:
            (future, logged), self._started = self._started, None
            return self.loop.wait(future, self.limit), logged
        logged = Logged(len(part))
        keywords = arguments(self.spec.call, part, logged, self.trainer_state)
        if self.is_async:
            return self.loop.wait(self._on_loop(keywords), self.limit), logged
        started = time.perf_counter()
        try:
            returned = call_within(self.limit, lambda: _run(self.spec.call, keywords))
        finally:
            self.seconds += time.perf_counter() - started
        if inspect.isawaitable(returned):  # a lambda around a coroutine function
            returned = self.loop.wait(self.loop.start(lambda: returned, self.limit), self.limit)
        return returned, logged

    def _on_loop(self, keywords: dict[str, Any]) -> Future[Any]:
        async def timed() -> Any:
            started = time.perf_counter()
            try:
                return await self.spec.call(**keywords)
            finally:
                self.seconds += time.perf_counter() - started

        return self.loop.start(timed, self.limit)


def _run(reward: Reward, keywords: dict[str, Any]) -> Any:
    returned = reward(**keywords)
    return list(returned) if inspect.isgenerator(returned) else returned  # its work counts against the limit too


def _specs(rewards: Sequence[RewardSpec | Reward], weights: Sequence[float] | None) -> list[RewardSpec]:
    """Specs with names that differ (`name`, `name_2`, ...) and the given weights."""
    if not rewards:
        raise RewardError("there is no reward; give at least one function, reward model or name of a built-in reward.")
    specs = [
        reward if isinstance(reward, RewardSpec) else RewardSpec(name=name_of(reward), call=reward)
        for reward in rewards
    ]
    if weights is not None and len(weights) != len(specs):
        raise ConfigError(f"reward_weights has {len(weights)} values for {len(specs)} rewards; give one for each.")
    if weights is not None:
        specs = [replace(spec, weight=float(weight)) for spec, weight in zip(specs, weights, strict=True)]
    seen: dict[str, int] = {}
    for i, spec in enumerate(specs):
        seen[spec.name] = seen.get(spec.name, 0) + 1
        if seen[spec.name] > 1:
            specs[i] = replace(spec, name=f"{spec.name}_{seen[spec.name]}")
    return specs


def _attach(groups: Sequence[Group], outcomes: Sequence[Outcome], batch: Batch) -> list[Group]:
    """Each group with its rows of the scores [N, R], the events that concern it, and its logged columns."""
    scores = torch.stack([outcome.scores for outcome in outcomes], dim=-1)  # [N, R]
    events = [event for outcome in outcomes for event in outcome.events(batch)]
    extras: dict[str, list[Any]] = {column: values for outcome in outcomes for column, values in outcome.extras.items()}
    scored, start = [], 0
    for group in groups:
        stop = start + group.size
        scored.append(
            replace(
                group,
                rewards=scores[start:stop],
                events=(*group.events, *(event for index, event in events if start <= index < stop)),
                extras={**group.extras, **{column: values[start:stop] for column, values in extras.items()}},
            )
        )
        start = stop
    return scored
