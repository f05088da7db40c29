"""Calls of user code that end by a deadline: on the main thread, in a worker thread, or on one event loop.

Limits: on Linux a call on the main thread is interrupted by a signal, which ends Python loops, sleeps, waits and regular
expressions, but not C code that never looks at signals (a sum of huge integers). Elsewhere (Windows, macOS, a caller that is
not the main thread) the call runs in a daemon thread that is abandoned at the deadline: a thread cannot be killed, but is
asked to end where Python code runs next. What holds up the whole process past ten times its limit ends the process, with the
stack on standard error; only a worker process (`covey.rewards.workers`) can be killed alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import math
import queue
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from covey.rewards import alarm
from covey.rewards.watchdog import Watched

T = TypeVar("T")

_GRACE_SECONDS = 1.0


class DeadlineError(TimeoutError):
    """The call did not return in time; its cause shows where it hung."""


class _Interrupted(BaseException):
    """Raised inside the call; not an Exception, so that `except Exception` in user code does not swallow it."""


def call_within(seconds: float | None, function: Callable[[], T]) -> T:
    """What `function()` returns. Raises DeadlineError once `seconds` have passed (`None` or infinity: never)."""
    if seconds is None or math.isinf(seconds):
        return function()
    with Watched(seconds):
        if threading.current_thread() is threading.main_thread() and alarm.is_available():
            return _interrupting(seconds, function)
        return _abandoning(seconds, function)


def _interrupting(seconds: float, function: Callable[[], T]) -> T:
    active = True

    def interrupt(signum: int, frame: Any) -> None:
        if active:
            raise _Interrupted

    assert alarm.SIGNAL is not None
    signal.signal(alarm.SIGNAL, interrupt)
    try:
        with alarm.Alarm(seconds):
            try:
                return function()
            finally:
                active = False
    except _Interrupted as error:
        raise DeadlineError(_said(seconds)) from error
    finally:
        signal.signal(alarm.SIGNAL, _ignore)  # the default action would end the process if one were still on its way


def _ignore(signum: int, frame: Any) -> None:
    return


def _abandoning(seconds: float, function: Callable[[], T]) -> T:
    box: queue.SimpleQueue[concurrent.futures.Future[T]] = queue.SimpleQueue()

    def work() -> None:
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            outcome.set_result(function())
        except BaseException as error:  # noqa: BLE001 - carried to the caller, who decides
            outcome.set_exception(error)
        box.put(outcome)

    thread = threading.Thread(target=work, name="covey-reward", daemon=True)
    thread.start()
    try:
        outcome = box.get(timeout=seconds)
    except queue.Empty:
        where = _stack_of(thread)
        if thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Interrupted)
            )
        raise DeadlineError(_said(seconds)) from Exception(f"in a thread, at the limit:\n{where}")
    return outcome.result()


def _stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "it ended meanwhile"


class EventLoop:
    """One asyncio loop in a daemon thread, started when first needed and kept: sessions of user code stay valid."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self, make: Callable[[], Awaitable[T]], seconds: float | None) -> concurrent.futures.Future[T]:
        """Start `make()` on the loop; the future raises DeadlineError past `seconds`."""
        limit = None if seconds is None or math.isinf(seconds) else seconds

        async def limited() -> T:
            task = asyncio.ensure_future(make())
            await asyncio.wait({task}, timeout=limit)
            if task.done():
                return task.result()
            task.cancel()
            try:
                return await task
            except asyncio.CancelledError as error:
                raise DeadlineError(_said(limit or 0.0)) from error

        return asyncio.run_coroutine_threadsafe(limited(), self._running())

    def wait(self, future: concurrent.futures.Future[T], seconds: float | None) -> T:
        """The future's result. A loop that user code blocks is abandoned past the limit, and the next call gets a new one."""
        limit = None if seconds is None or math.isinf(seconds) else seconds + _GRACE_SECONDS
        try:
            return future.result(limit)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            self._loop = self._thread = None
            raise DeadlineError(f"{_said(seconds or 0.0)}, and blocks the event loop") from None

    def close(self) -> None:
        """Stop the loop and its thread."""
        thread, self._loop, self._thread = self._thread, None, None
        if thread is not None:
            self._stop()
            thread.join(timeout=5.0)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name="covey-reward-async", daemon=True
                )
                self._thread.start()
                self._stop = weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _said(seconds: float) -> str:
    return f"it did not return within {seconds:g} seconds"
