"""One reward and every way of calling it: on the caller's thread, on the event loop, in a thread, in a worker process."""

import functools
import inspect
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from covey.rewards.adaptive_batches import portions_of
from covey.rewards.calling.deadline import EventLoop, Lanes, call_within
from covey.rewards.calling.outcome import Breaker, Outcome, evaluate
from covey.rewards.calling.score_cache import ScoreCache
from covey.rewards.calling.workers import WorkerPool, call_in_worker
from covey.rewards.contract import Batch, Logged, RewardSpec, arguments, is_async
from covey.rewards.decorators import call_options_of
from covey.rewards.surroundings import Surroundings
from covey.types import Reward

_ASYNC_AT_ONCE = 16


class Caller:
    """Calls one reward within its limits. `submit` gives a future at once, `score` runs here; both give an `Outcome`."""

    def __init__(
        self, spec: RewardSpec, limit: float | None, loop: EventLoop, *, isolate: bool, workers: int = 1
    ) -> None:
        self.spec, self.call_options, self.limit, self.loop, self.isolate = spec, spec.how, limit, loop, isolate
        self.is_async = is_async(spec.call)
        self.pool = None
        if self.call_options.isolated and not self.is_async:
            self.pool = WorkerPool(spec.name, spec.call, self.call_options.concurrency or workers)
        self.portions = portions_of(spec.call)
        self.cache = ScoreCache() if self.call_options.pure else None
        self.breaker = Breaker()
        self.asks_again = True
        """True if a late call is repeated on halves: not after a batch that was wholly lost."""
        self.changed: dict[str, None] = {}
        """Process-wide state that its calls changed and that was restored."""
        at_once = self.call_options.concurrency or (_ASYNC_AT_ONCE if self.is_async else workers if self.pool else 1)
        self._lanes = Lanes(spec.name, at_once)

    @property
    def is_concurrent(self) -> bool:
        """True when it runs concurrently with the caller's thread rather than on it."""
        return self.is_async or self.pool is not None or self.call_options.in_thread or self.call_options.streams

    def submit(self, batch: Batch, trainer_state: object) -> list[tuple[list[int], Future[Outcome]]]:
        """Start scoring the batch, in one call or in one for each completion: places in the batch, and the future outcome."""
        start = lambda part: self._lanes.run(functools.partial(self.score, part, trainer_state))
        if self.call_options.unit != "completion":
            return [(list(range(len(batch))), start(batch))]
        return [([i], start(batch.take([i]))) for i in range(len(batch))]

    def score(self, batch: Batch, trainer_state: object) -> Outcome:
        """Score the batch by calls within the time limit; a pure reward's known scores are not asked again."""
        if self.cache is None:
            return self._called(batch, trainer_state)
        return self.cache.score(batch, self.spec.name, lambda part: self._called(part, trainer_state))

    def close(self) -> None:
        """Kill the workers and let the threads end."""
        self._lanes.close()
        if self.pool is not None:
            self.pool.close()

    def _called(self, part: Batch, trainer_state: object) -> Outcome:
        call = _Call(self, trainer_state)
        outcome = evaluate(
            self.spec.name, call, part, seconds=self.limit, isolate=self.isolate, asks_again=self.asks_again
        )
        self.asks_again = not outcome.is_lost
        outcome.seconds, outcome.num_calls = call.seconds, call.count
        outcome.notices += self.portions.take_events() if self.portions else ()
        self.breaker.note(outcome)
        return outcome


class _Call:
    """An attempt at any part of a batch, and the time that its calls took."""

    def __init__(self, caller: Caller, trainer_state: object) -> None:
        self.caller, self.trainer_state = caller, trainer_state
        self.seconds, self.count = 0.0, 0

    def __call__(self, part: Batch, limit: float | None) -> tuple[object, Logged]:
        caller, logged = self.caller, Logged(len(part))
        caller.breaker.refuse(caller.spec.name)
        keywords = arguments(caller.spec.call, part, logged, self.trainer_state)
        self.count += 1
        started = time.perf_counter()
        try:
            returned = self._run(keywords, logged, limit)
        finally:
            self.seconds += time.perf_counter() - started
        return [returned] if caller.call_options.is_singular else returned, logged

    def _run(self, keywords: dict[str, Any], logged: Logged, limit: float | None) -> object:
        caller = self.caller
        reward = caller.spec.call
        if (before := call_options_of(reward).before) is not None:
            before()
        if caller.pool is not None:
            return call_in_worker(caller.pool, keywords, logged, limit)
        if caller.is_async:
            return caller.loop.run(lambda: reward(**keywords), limit, caller.spec.name)
        call = functools.partial(call_within, limit, functools.partial(_as_list, reward, keywords, logged.size))
        returned = call() if caller.is_concurrent else self._guarded(call)
        if inspect.isawaitable(returned):  # a lambda around a coroutine function
            return caller.loop.run(lambda: returned, limit, caller.spec.name)
        return returned

    def _guarded(self, call: Callable[[], object]) -> object:
        """Result of `call()`; process-wide state that it changed is restored before anything else runs."""
        before = Surroundings.now()
        try:
            return call()
        finally:
            self.caller.changed.update(dict.fromkeys(before.put_back()))


def _as_list(reward: Reward, keywords: dict[str, Any], size: int) -> object:
    """The reward's result. An iterator is read here, so that its work counts against the time limit: at most `size + 1` values."""
    returned = reward(**keywords)
    return list(itertools.islice(returned, size + 1)) if isinstance(returned, Iterator) else returned
