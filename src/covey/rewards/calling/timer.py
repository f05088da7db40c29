"""A kernel timer with a signal of its own, in addition to the one timer of `signal.setitimer`.

`SIGALRM` belongs to rewards that limit their own time (math-verify does), and a Python thread cannot send
anything while C code keeps the interpreter lock, as regular expressions do. POSIX timers (`timer_create(2)`) have neither
problem; Python does not wrap them.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from functools import lru_cache
from types import TracebackType
from typing import Any

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
    """`with Alarm(seconds):` sends `SIGNAL` to this process after `seconds`, then every second, until the block ends."""

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
