"""One reward and every way of calling it: on the caller's thread, on the event loop, in a thread, in a worker process."""

import functools
import hashlib
import inspect
import itertools
import pickle
import queue
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from covey.rewards.adaptive_batches import portions_of
from covey.rewards.calling.deadline import EventLoop, call_within
from covey.rewards.calling.outcome import CircuitOpen, Outcome, evaluate
from covey.rewards.calling.workers import WorkerPool, light_state
from covey.rewards.contract import Batch, Logged, RewardSpec, Total, arguments, is_async
from covey.rewards.decorators import call_options_of
from covey.rewards.surroundings import Surroundings
from covey.types import Reward

_ASYNC_AT_ONCE = 16
_LOST_IN_A_ROW = 3
_LOGS = ("log_extra", "log_metric")


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

    def submit(self, batch: Batch, trainer_state: Any) -> list[tuple[list[int], Future[Outcome]]]:
        """Start scoring the batch, in one call or in one for each completion: places in the batch, and the future outcome."""
        if self.call_options.unit != "completion":
            return [(list(range(len(batch))), self._lanes.run(lambda: self.score(batch, trainer_state)))]
        return [([i], self._one(batch.part(i, i + 1), trainer_state)) for i in range(len(batch))]

    def _one(self, part: Batch, trainer_state: Any) -> Future[Outcome]:
        return self._lanes.run(lambda: self.score(part, trainer_state))

    def score(self, batch: Batch, trainer_state: Any) -> Outcome:
        """Score the batch: cached scores at once, the rest by calls within the time limit."""
        keys = self._keys(batch)
        cached = [None] * len(batch) if keys is None or self.cache is None else self.cache.get(keys)
        missing = [i for i, value in enumerate(cached) if value is None]
        parts: list[tuple[Sequence[int], Outcome]] = []
        if missing:
            part = batch if len(missing) == len(batch) else batch.take(missing)
            parts.append(
                (missing, self._called(part, None if keys is None else [keys[i] for i in missing], trainer_state))
            )
        outcome = Outcome.joined(self.spec.name, parts, len(batch))
        for i, value in enumerate(cached):
            if value is not None:
                outcome.scores[i] = value[0]
        outcome.num_cached = len(batch) - len(missing)
        return outcome

    def close(self) -> None:
        """Kill the workers and let the threads end."""
        self._lanes.close()
        if self.pool is not None:
            self.pool.close()

    def _keys(self, batch: Batch) -> list[bytes] | None:
        if self.cache is None:
            return None
        lists = {"prompts": batch.prompts, "completions": batch.completions, "completion_ids": batch.completion_ids}
        return keys_of({**batch.columns, **lists}, len(batch))

    def _called(self, part: Batch, keys: Sequence[bytes] | None, trainer_state: Any) -> Outcome:
        call = _Call(self, trainer_state)
        outcome = evaluate(
            self.spec.name, call, part, seconds=self.limit, isolate=self.isolate, asks_again=self.asks_again
        )
        self.asks_again = not outcome.is_lost
        outcome.seconds, outcome.num_calls = call.seconds, call.count
        outcome.notices += self.portions.take_events() if self.portions else ()
        self.breaker.note(outcome)
        says_more = outcome.extras or outcome.metrics  # those must come again the next time
        if keys is not None and self.cache is not None and not says_more:
            failed = {i for failure in outcome.failures for i in range(failure.start, failure.stop)}
            good = [i for i in range(len(part)) if i not in failed]
            self.cache.put([keys[i] for i in good], [float(outcome.scores[i]) for i in good])
        return outcome


class _Call:
    """An attempt at any part of a batch, and the time that its calls took."""

    def __init__(self, caller: Caller, trainer_state: Any) -> None:
        self.caller, self.trainer_state = caller, trainer_state
        self.seconds, self.count = 0.0, 0

    def __call__(self, part: Batch, limit: float | None) -> tuple[Any, Logged]:
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

    def _run(self, keywords: dict[str, Any], logged: Logged, limit: float | None) -> Any:
        caller = self.caller
        reward = caller.spec.call
        if (before := call_options_of(reward).before) is not None:
            before()
        if caller.pool is not None:
            return _in_worker(caller.pool, keywords, logged, limit)
        if caller.is_async:
            return caller.loop.run(lambda: reward(**keywords), limit, caller.spec.name)
        call = functools.partial(_as_list, reward, keywords, logged.size)
        returned = (
            call_within(limit, call)
            if caller.is_concurrent
            else self._guarded(functools.partial(call_within, limit, call))
        )
        if inspect.isawaitable(returned):  # a lambda around a coroutine function
            return caller.loop.run(lambda: returned, limit, caller.spec.name)
        return returned

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """Result of `call()`; process-wide state that it changed is restored before anything else runs."""
        before = Surroundings.now()
        try:
            return call()
        finally:
            self.caller.changed.update(dict.fromkeys(before.put_back()))


def _as_list(reward: Reward, keywords: dict[str, Any], size: int) -> Any:
    """The reward's result. An iterator is read here, so that its work counts against the time limit: at most `size + 1` values."""
    returned = reward(**keywords)
    return list(itertools.islice(returned, size + 1)) if isinstance(returned, Iterator) else returned


def _in_worker(pool: WorkerPool, keywords: dict[str, Any], logged: Logged, limit: float | None) -> Any:
    plain = {name: value for name, value in keywords.items() if name not in _LOGS}
    if "trainer_state" in plain:
        plain["trainer_state"] = light_state(plain["trainer_state"])
    reply = pool.call(plain, tuple(name for name in _LOGS if name in keywords), limit)
    for column, values in reply["extras"].items():
        logged.extra(column, values)
    for name, value in reply["metrics"]:
        logged.metric(name, Total(*value) if isinstance(value, list) else value)
    return reply["values"]


class Breaker:
    """After three lost calls in a row the rest of the batch is not called: 64 groups do not wait 64 time limits.

    The next batch tries again, and one lost call is enough then; a call that comes back closes the circuit.
    """

    def __init__(self) -> None:
        self._lost = 0
        self._is_open = False
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        return self._is_open

    def begin(self) -> None:
        """A new batch: half open where the last one ended open."""
        with self._lock:
            self._lost = _LOST_IN_A_ROW - 1 if self._is_open else 0
            self._is_open = False

    def refuse(self, name: str) -> None:
        """Raise CircuitOpen while the circuit is open."""
        if self._is_open:
            raise CircuitOpen(
                f"not called, because reward {name!r} lost {_LOST_IN_A_ROW} calls in a row; the next batch tries it again"
            )

    def note(self, outcome: Outcome) -> None:
        """Count a call that was wholly lost to a time limit or a connection; an answer of any kind starts again at 0."""
        is_lost = outcome.is_lost and all(isinstance(failure.error, OSError) for failure in outcome.failures)
        with self._lock:
            self._lost = self._lost + 1 if is_lost else 0
            self._is_open = self._is_open or self._lost >= _LOST_IN_A_ROW


class Lanes:
    """A few daemon threads that take work in turn; they start with the first work and end when closed."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self._open()

    def run(self, work: Callable[[], Any]) -> Future[Any]:
        """Future of `work()`."""
        future: Future[Any] = Future()
        self._queue.put((work, future))
        if len(self._threads) < self.size:
            thread = threading.Thread(target=_serve, args=(self._queue,), name=f"covey-{self.name}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def close(self) -> None:
        """Let the threads end; work that comes later gets new ones."""
        self._finish()
        self._open()

    def _open(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._finish = weakref.finalize(self, _end, self._queue, self._threads)


def _end(work: queue.SimpleQueue[Any], threads: list[threading.Thread]) -> None:
    while threads:
        threads.pop()
        work.put(None)


def _serve(work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    while (item := work.get()) is not None:
        function, future = item
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - carried to the waiting thread
            future.set_exception(error)
        del item, function, future


_MOST = 100_000


class ScoreCache:
    """Values by the content of a completion's keywords, the least recently used one leaving at 100,000."""

    def __init__(self, most: int = _MOST) -> None:
        self.most = most
        self._values: OrderedDict[bytes, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, keys: Sequence[bytes]) -> list[tuple[Any] | None]:
        """Each key's value in a tuple, None where it is not known."""
        with self._lock:
            for key in keys:
                if key in self._values:
                    self._values.move_to_end(key)
            return [(self._values[key],) if key in self._values else None for key in keys]

    def put(self, keys: Sequence[bytes], values: Sequence[Any]) -> None:
        with self._lock:
            self._values.update(zip(keys, values, strict=True))
            while len(self._values) > self.most:
                self._values.popitem(last=False)


def keys_of(keywords: Mapping[str, Sequence[Any]], size: int) -> list[bytes] | None:
    """A digest for each of `size` completions of aligned `keywords`; None when their content cannot be hashed.

    Equal digests mean equal content. The reverse need not hold, which costs a call and nothing else.
    """
    names = sorted(keywords)
    try:
        rows = [pickle.dumps([(name, keywords[name][i]) for name in names], protocol=5) for i in range(size)]
    except (pickle.PicklingError, TypeError, AttributeError):
        return None
    return [hashlib.blake2b(row, digest_size=16).digest() for row in rows]
