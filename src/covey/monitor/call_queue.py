"""Calls that wait in line on a thread of their own: a tracker's server that does not answer holds up nothing but itself."""

import contextvars
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


def nothing() -> None:
    """No-op `prepare` for threads that need no set-up."""


@dataclass(eq=False)
class CallQueue:
    """Queue of calls to one tracker, run one at a time and in order on a thread. Exceptions are logged, never raised.

    The thread starts with the first call and ends with `close`; it inherits the context variables of the thread that starts it.
    """

    name: str
    prepare: Callable[[], Callable[[], object]] = lambda: nothing
    """Called where the thread is started; its result is called on the thread before the first call, until it succeeds."""
    most: int = 10_000
    """Capacity of the queue, in calls; more are dropped."""
    patience_seconds: float = 60.0
    """Seconds after which a running call is reported as slow, and after which `flush` no longer waits for it."""
    _waiting: deque[tuple[str, Callable[[], object]]] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _running: tuple[str, float] | None = None
    """The running call's description and its start time."""
    _is_closing: bool = False
    _is_warned: bool = False
    """True if the running call was already reported as slow."""
    _is_abandoned: bool = False
    """True if the running call was already counted as dropped."""
    _lost: int = 0
    _failed: dict[str, int] = field(default_factory=dict)
    """Calls in a row that raised, by their kind once it is reported: `on_log` may fail where `on_save` has nothing to do."""
    _is_failing: bool = False
    """True if the last call raised, of any kind: what fails next belongs to the same outage."""

    def put(self, what: str, call: Callable[[], object]) -> None:
        """Append a call to the queue. Returns at once."""
        with self._changed:
            if len(self._waiting) >= self.most:
                self._lose()
                return
            self._waiting.append((what, call))
            self._is_closing = False
            if self._thread is None:
                self._start()
            self._changed.notify_all()
        self._tell_if_stuck()

    def wait(self, each_seconds: float, longest_seconds: float) -> bool:
        """Wait until the queue is empty and idle. False when one call takes longer than `each_seconds`, or all of them too long."""
        end = time.monotonic() + longest_seconds
        with self._changed:
            while self._waiting or self._running:
                now = time.monotonic()
                begun = self._running[1] if self._running else now
                left = min(end, begun + each_seconds) - now
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def flush(self, longest_seconds: float = 600.0) -> bool:
        """Drain the queue until the deadline and drop the rest. True if every call was delivered."""
        is_whole = self.wait(self.patience_seconds, longest_seconds)
        with self._changed:
            is_stuck = self._running is not None
            left = len(self._waiting) + self._lost + (is_stuck and not self._is_abandoned)
            self._is_abandoned = is_stuck
            self._waiting.clear()
            self._lost = 0
        if left:
            logger.warning(
                "%s did not take %d of its calls in time; metrics.jsonl and alerts.jsonl have everything.",
                self.name, left,
            )  # fmt: skip
        return is_whole

    def close(self, longest_seconds: float = 600.0) -> None:
        """`flush`, then end the thread; a thread that hangs in a call ends with the process."""
        if self._thread is None:
            return
        is_whole = self.flush(longest_seconds)
        with self._changed:
            thread, self._is_closing = self._thread, True
            self._changed.notify_all()
        if is_whole and thread is not None:
            thread.join()

    @property
    def is_idle(self) -> bool:
        return not self._waiting and self._running is None

    def call(self, what: str, call: Callable[[], object]) -> None:
        """Call on this thread. Exceptions are logged, once for several in a row of one kind or of one outage."""
        kind = what.partition(" at ")[0]
        try:
            call()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a tracker is third-party code with a server
            error.__traceback__ = None  # TensorBoard raises one exception at each call: it would keep the frames of all
            was_failing, self._is_failing = self._is_failing, True
            if kind in self._failed:
                self._failed[kind] += 1
            elif not was_failing:
                self._failed[kind] = 1
                logger.warning(
                    "%s failed in %s (%s: %s); training goes on, and metrics.jsonl has every number.",
                    self.name, what, type(error).__name__, error,
                )  # fmt: skip
            return
        self._is_failing = False
        if (failed := self._failed.pop(kind, 0)) > 1:
            logger.warning("%s works again in %s, after %d calls that failed.", self.name, what, failed)

    def _start(self) -> None:
        first, context = self.prepare(), contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._work, first), name=f"covey-{self.name}", daemon=True
        )
        self._thread.start()

    def _work(self, first: Callable[[], object]) -> None:
        pending = [first]

        def whole(call: Callable[[], object]) -> None:
            if pending:
                pending[0]()
                pending.clear()
            call()

        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    self._thread = None
                    return
                what, call = self._waiting.popleft()
                self._running = (what, time.monotonic())
            self.call(what, lambda call=call: whole(call))  # type: ignore[misc]
            with self._changed:
                self._running = None
                was_slow, self._is_warned, self._is_abandoned = self._is_warned, False, False
                self._changed.notify_all()
            if was_slow:
                logger.warning("%s came back from %s.", self.name, what)

    def _lose(self) -> None:
        self._lost += 1
        if self._lost == 1:
            logger.warning(
                "%d calls wait for %s, so new ones are left out until it goes on; metrics.jsonl has every number.",
                self.most, self.name,
            )  # fmt: skip

    def _tell_if_stuck(self) -> None:
        running = self._running
        if running is None or self._is_warned or time.monotonic() - running[1] < self.patience_seconds:
            return
        self._is_warned = True
        logger.warning(
            "%s has not come back from %s for %.0f seconds. Training goes on; up to %d of its calls wait, and "
            "metrics.jsonl has every number.",
            self.name, running[0], self.patience_seconds, self.most,
        )  # fmt: skip
