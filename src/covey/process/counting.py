"""Progress of long work, reported to a listener: none in a script, the counter on a terminal on the command line."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TextIO, TypeVar

T = TypeVar("T")
Listener = Callable[[str, int, "int | None"], None]
"""Progress callback `(what, done, total)`: the unit, the count so far, and the total or None if unknown."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def tell(what: str, done: int, total: int | None) -> None:
    """Report to the listener that `done` of `total` are done."""
    listener = _listener.get()
    if listener is not None:
        listener(what, done, total)


def counted(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The items; each counts as done when the next is requested. `total` None: `len(items)` where there is one."""
    total = len(items) if total is None and isinstance(items, Sized) else total
    tell(what, 0, total)
    for done, item in enumerate(items, 1):
        yield item
        tell(what, done, total)


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Context in which `listener` receives progress."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 2.0
"""Least time between two lines that stay."""


class Counter:
    """Progress counter on the terminal, fed by `covey.process.counting`. Other writers to the terminal must call `clear` first."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._what = ""
        self._begun = self._drawn = 0.0
        self._first = 0
        """Count that was done when the counting began."""
        self._tenth = 0
        self._is_new = False
        self._is_drawn = False

    def __call__(self, what: str, done: int, total: int | None) -> None:
        now = self._clock()
        if what != self._what or done == 0:
            self.clear()
            self._what, self._begun, self._first, self._tenth, self._drawn = what, now, done, 0, now
            self._is_new = True
        text = self._line(what, done, total, now - self._begun)
        if is_terminal(self._stream or sys.stderr):
            self._redraw(text, now, is_last=done == total)
        elif total and 10 * done // total > self._tenth and now - self._drawn >= _LINE_SECONDS:
            self._tenth, self._drawn = 10 * done // total, now
            self._write(text + "\n")

    def clear(self) -> None:
        """Take the line off the terminal."""
        if self._is_drawn:
            self._is_drawn = False
            self._write("\r\x1b[K")

    def _line(self, what: str, done: int, total: int | None, seconds: float) -> str:
        if total is None:
            return f"{what}: {done:,}"
        new = done - self._first
        left = f", {duration(seconds / new * (total - done))} left" if new > 0 and done < total else ""
        return f"{what}: {done:,} of {total:,}{left}"

    def _redraw(self, text: str, now: float, *, is_last: bool) -> None:
        if is_last:
            self.clear()
        elif self._is_new or now - self._drawn >= _REDRAW_SECONDS:
            self._drawn, self._is_drawn, self._is_new = now, True, False
            width = _columns(self._stream or sys.stderr)
            self._write("\r\x1b[K" + text[: width - 1])

    def _write(self, text: str) -> None:
        stream = self._stream or sys.stderr
        with suppress(OSError, ValueError):  # the reader of the stream is gone
            stream.write(text)
            stream.flush()


def _columns(stream: TextIO) -> int:
    try:
        return max(os.get_terminal_size(stream.fileno()).columns or 80, 20)  # 0: the terminal does not say
    except (OSError, ValueError):
        return 80


def duration(seconds: float) -> str:
    """`0:42`, `12:05`, `3:07:00`, `2 d 03:00`."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def is_terminal(stream: TextIO) -> bool:
    """True if a line can be redrawn there."""
    return not stream.closed and stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
