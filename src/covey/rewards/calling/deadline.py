"""Calls of user code that end by a deadline: on the main thread, in a worker thread, or on one event loop.

Limits: on Linux a call on the main thread is interrupted by a signal, which ends Python loops, sleeps, waits and regular
expressions, but not C code that never looks at signals (a sum of huge integers). Elsewhere (Windows, macOS, a caller that is
not the main thread) the call runs in a daemon thread that is abandoned at the deadline: a thread cannot be killed, but is
asked to end where Python code runs next. A call that blocks the whole process (holding the GIL) past ten times its limit ends the process,
with the stack on standard error; only a worker process (`covey.rewards.calling.workers`) can be killed alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import ctypes
import faulthandler
import functools
import io
import itertools
import math
import queue
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import lru_cache
from types import TracebackType
from typing import Any, TypeVar, cast

SIGNAL = getattr(signal, "SIGRTMAX", None)
"""Launchers use SIGUSR1 and 2, libraries use SIGALRM; this one has no known user."""
_CLOCK_MONOTONIC = 1


class _Event(ctypes.Structure):
    _fields_ = [  # struct sigevent, 64 bytes on Linux
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),  # 0: send the signal
        ("rest", ctypes.c_byte * 48),
    ]


class _Span(ctypes.Structure):
    _fields_ = [
        ("repeat_seconds", ctypes.c_long),
        ("repeat_nanoseconds", ctypes.c_long),
        ("first_seconds", ctypes.c_long),
        ("first_nanoseconds", ctypes.c_long),
    ]


class Alarm:
    """`with Alarm(seconds):` sends `SIGNAL` to this process after `seconds`, then every second, until the block ends.

    A POSIX timer (`timer_create(2)`), which Python does not wrap: `SIGALRM` belongs to rewards that limit their own time (math-verify
    does), and a Python thread cannot send anything while C code keeps the interpreter lock, as regular expressions do.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = max(seconds, 1e-3)  # zero would mean never
        self._timer = ctypes.c_void_p()

    def __enter__(self) -> Alarm:
        library = _library()
        assert library is not None
        event = _Event(signal=int(SIGNAL or 0))
        if library.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), "timer_create failed")
        whole = int(self.seconds)
        span = _Span(1, 0, whole, int((self.seconds - whole) * 1e9))
        library.timer_settime(self._timer, 0, ctypes.byref(span), None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        library = _library()
        assert library is not None
        library.timer_delete(self._timer)


def is_available() -> bool:
    """True on Linux with a C library that has POSIX timers."""
    return SIGNAL is not None and _library() is not None


@lru_cache
def _library() -> Any:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    return library if hasattr(library, "timer_create") else None


T = TypeVar("T")

_GRACE_SECONDS = 1.0
_Came = tuple[Any, BaseException | None]
"""A value, or an exception."""
_OWNER: contextvars.ContextVar[str] = contextvars.ContextVar("covey_reward", default="")


class DeadlineError(TimeoutError):
    """The call did not return in time; its cause shows where it hung."""

    is_running = False
    """True if the call is still running, because it could not be ended."""


class _Interrupted(BaseException):
    """Raised inside the call; not an Exception, so that `except Exception` in user code does not swallow it."""


def call_within(seconds: float | None, function: Callable[[], T]) -> T:
    """Result of `function()`. Raises DeadlineError once `seconds` have passed (`None` or infinity: never)."""
    if seconds is None or math.isinf(seconds):
        return function()
    with HangGuard(seconds):
        if threading.current_thread() is threading.main_thread() and is_available():
            return _interrupting(seconds, function)
        return _abandoning(seconds, function)


def _interrupting(seconds: float, function: Callable[[], T]) -> T:
    active = True

    def interrupt(signum: int, frame: Any) -> None:
        if active:
            raise _Interrupted

    assert SIGNAL is not None
    signal.signal(SIGNAL, interrupt)
    try:
        with Alarm(seconds):
            try:
                return function()
            finally:
                active = False
    except _Interrupted as error:
        raise DeadlineError(_in_words(seconds)) from error
    finally:
        signal.signal(SIGNAL, signal.SIG_IGN)  # the default action would end the process if one were still on its way


def _abandoning(seconds: float, function: Callable[[], T]) -> T:
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    thread = threading.Thread(target=settle, args=(outcome, function), name="covey-reward", daemon=True)
    thread.start()
    if not concurrent.futures.wait([outcome], seconds).done:
        frame = sys._current_frames().get(thread.ident or 0)
        where = "".join(traceback.format_stack(frame)) if frame is not None else "it ended meanwhile"
        if thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Interrupted)
            )
            thread.join(_GRACE_SECONDS)
        late = DeadlineError(_in_words(seconds))
        late.is_running = thread.is_alive()
        raise late from Exception(f"in a thread, at the limit:\n{where}")
    return outcome.result()


def settle(future: concurrent.futures.Future[T], function: Callable[[], T]) -> None:
    """Give the future the result of `function()`, or its exception of any kind."""
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 - carried to the waiting thread, which decides
        future.set_exception(error)


class EventLoop:
    """One asyncio loop in a daemon thread, started when first needed and kept: sessions of user code stay valid."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], str] = weakref.WeakKeyDictionary()

    def run(self, make: Callable[[], Awaitable[T]], seconds: float | None, owner: str = "") -> T:
        """Result of `make()`, awaited on the event loop. Re-raises its exception; DeadlineError past `seconds`.

        A loop that user code blocks is abandoned past the limit, and the next call gets a new one.
        """
        limit = None if seconds is None or math.isinf(seconds) else seconds

        async def limited() -> _Came:
            task = asyncio.ensure_future(_caught(make, owner))
            await asyncio.wait({task}, timeout=limit)
            if task.done():
                return task.result()
            task.cancel()
            value, error = await task
            late = DeadlineError(_in_words(limit or 0.0)) if isinstance(error, asyncio.CancelledError) else None
            if late is not None:
                late.__cause__ = error
            return value, late or error

        future = asyncio.run_coroutine_threadsafe(limited(), self._running())
        try:
            value, error = future.result(None if limit is None else limit + _GRACE_SECONDS)
        except concurrent.futures.TimeoutError:
            self._loop = self._thread = None
            late = DeadlineError(f"{_in_words(seconds or 0.0)}, and blocks the event loop")
            late.is_running = True
            raise late from None
        if error is not None:
            raise error
        return cast(T, value)

    def cancel_left(self) -> dict[str, int]:
        """Cancel the tasks that calls started and never awaited; how many, by the calls' `owner`."""
        if self._loop is None or not self._loop.is_running():
            return {}
        try:
            return asyncio.run_coroutine_threadsafe(_cancel(self._tasks), self._loop).result(_GRACE_SECONDS)
        except concurrent.futures.TimeoutError:  # user code blocks the loop; the next call finds that out
            return {}

    def close(self) -> None:
        """Stop the loop and its thread."""
        thread, self._loop, self._thread = self._thread, None, None
        if thread is not None:
            self._stop()
            thread.join(timeout=5.0)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop, ends = asyncio.new_event_loop(), threading.Event()
                self._loop.set_task_factory(functools.partial(_task, self._tasks))
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop, ends), name="covey-reward-async", daemon=True
                )
                self._thread.start()
                self._stop = weakref.finalize(self, _end, self._loop, ends)
            return self._loop


async def _caught(make: Callable[[], Awaitable[Any]], owner: str) -> _Came:
    """A value, or an exception as a value: some of them would end the loop on their way out of a task."""
    _OWNER.set(owner)
    try:
        return await make(), None
    except BaseException as error:  # noqa: BLE001 - carried to the caller, who decides
        return None, error


def _task(
    tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], str], loop: asyncio.AbstractEventLoop, work: Any, **options: Any
) -> asyncio.Task[Any]:
    """The loop's task factory: notes which call a task was started by."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
    if _OWNER.get():
        tasks[task] = _OWNER.get()
    return task


async def _cancel(tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], str]) -> dict[str, int]:
    left = [(task, owner) for task, owner in list(tasks.items()) if not task.done()]
    for task, _ in left:
        task.cancel()
    await asyncio.sleep(0)
    return dict(Counter(owner for _, owner in left))


def _serve(loop: asyncio.AbstractEventLoop, ends: threading.Event) -> None:
    while not ends.is_set():
        try:
            loop.run_forever()
        except BaseException:  # noqa: BLE001 - SystemExit in a task of the user's ends the task, not the loop
            continue
    loop.close()


def _end(loop: asyncio.AbstractEventLoop, ends: threading.Event) -> None:
    ends.set()
    loop.call_soon_threadsafe(loop.stop)


def _in_words(seconds: float) -> str:
    return f"it did not return within {seconds:g} seconds"


TIMES = 10.0
"""Multiple of its own time limit after which a call that blocks the whole process ends it."""
_AT_LEAST_SECONDS = 5.0

_lock = threading.RLock()
_until: dict[int, float] = {}
_numbers = itertools.count()


class HangGuard:
    """Time limit on a block: `with HangGuard(seconds):` ends the process with exit code 1 after ten times `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = max(TIMES * seconds, _AT_LEAST_SECONDS)
        self._number = next(_numbers)

    def __enter__(self) -> HangGuard:
        with _lock:
            _until[self._number] = time.monotonic() + self.seconds
            _arm()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        with _lock:
            del _until[self._number]
            _arm()


def _arm() -> None:
    """One timer for the whole process, at the earliest of all limits."""
    if not _until:
        faulthandler.cancel_dump_traceback_later()
        return
    if sys.__stderr__ is None:
        return
    try:
        left = max(0.1, min(_until.values()) - time.monotonic())
        faulthandler.dump_traceback_later(left, exit=True, file=sys.__stderr__)
    except (io.UnsupportedOperation, ValueError):
        return  # standard error is no file here: faulthandler cannot write to it


_Work = queue.SimpleQueue["tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None"]


class Lanes:
    """A few daemon threads that take work in turn; they start with the first work and end when closed."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size, self._lock = name, size, threading.Lock()
        self._open()

    def run(self, work: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        """Future of `work()`."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            self._queue.put((work, future))
            if len(self._threads) < self.size:
                turns = threading.Thread(
                    target=_take_turns, args=(self._queue,), name=f"covey-{self.name}", daemon=True
                )
                self._threads.append(turns)
                turns.start()
        return future

    def close(self) -> None:
        """Let the threads end; work that comes later gets new ones."""
        with self._lock:
            self._finish()
            self._open()

    def _open(self) -> None:
        self._queue: _Work = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._finish = weakref.finalize(self, _end_lanes, self._queue, self._threads)


def _end_lanes(work: queue.SimpleQueue[Any], threads: list[threading.Thread]) -> None:
    while threads:
        threads.pop()
        work.put(None)


def _take_turns(work: _Work) -> None:
    while (item := work.get()) is not None:
        function, future = item
        if future.set_running_or_notify_cancel():
            settle(future, function)
        del item, function, future
