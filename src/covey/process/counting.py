"""Progress of long work, reported to a listener: none in a script, the terminal on the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

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
