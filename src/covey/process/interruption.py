"""A stop signal heard in the middle of a step: between two tokens, or two micro-batches, so that a checkpoint comes in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class StopNow(BaseException):
    """The work of this step is given up, because a signal asked for it; no error, and caught by the loop alone."""


@dataclass
class Interruption:
    """Called wherever work can be left: raises StopNow once `is_asked()`, but only inside of `armed()`.

    With several processes it never raises: one that left alone would leave the others waiting, so they all finish the step.
    """

    is_asked: Callable[[], bool] = lambda: False
    is_alone: bool = True
    is_armed: bool = False

    def __call__(self) -> None:
        if self.is_armed and self.is_alone and self.is_asked():
            raise StopNow

    @contextmanager
    def armed(self) -> Iterator[None]:
        """What happens inside can be left, and leaves nothing behind."""
        self.is_armed = True
        try:
            yield
        finally:
            self.is_armed = False
