"""Background work on a thread during training, one task at a time; its exception is raised by `finish`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Runs one piece of work at a time on a thread of its own.

    The thread lives only as long as its work, and Python waits for it at exit, so nothing is cut off but by a kill.
    """

    def __init__(self) -> None:
        self._pending: Future[T] | None = None

    @property
    def is_busy(self) -> bool:
        """True while the work is running."""
        return self._pending is not None and not self._pending.done()

    def start(self, work: Callable[[], T], name: str) -> None:
        """Begin. The result of earlier work must have been taken with `finish`."""
        assert self._pending is None, "the work before was not taken"
        threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._pending = threads.submit(work)
        threads.shutdown(wait=False)  # no second piece comes: the thread ends with this one

    def finish(self) -> T | None:
        """Wait for the work and return its result, or re-raise its exception, once. None when there is no work."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()
