"""Watchdog for rewards that block the whole process: C code that neither returns, nor releases the GIL, nor handles signals.

No Python code can run then, so no checkpoint is written and no exception raised. A timer of the interpreter's own
`faulthandler` still prints the stack of every thread and ends the process, so that the run can be resumed.
"""

from __future__ import annotations

import faulthandler
import io
import itertools
import sys
import threading
import time
from types import TracebackType

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
