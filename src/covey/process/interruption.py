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

    With several processes one that left alone would leave the others waiting in their next collective. There it raises inside of
    `together()` only, and all processes leave where one has.
    """

    is_asked: Callable[[], bool] = lambda: False
    agree: Callable[[bool], bool] | None = None
    """True on every process if true on any, a collective; None: this process is alone."""
    is_armed: bool = False
    _is_apart: bool = False
    """True while this process may leave by itself, since it has yet to meet the others."""
    _is_in_step: bool = False
    """True while every process comes here as often as the others, so that they can agree each time."""

    def __call__(self) -> None:
        if not self.is_armed:
            return
        if self._is_in_step and self.agree is not None:
            if self.agree(self.is_asked()):
                raise StopNow
        elif (self.agree is None or self._is_apart) and self.is_asked():
            raise StopNow

    @contextmanager
    def armed(self) -> Iterator[None]:
        """What happens inside can be left, and leaves nothing behind."""
        self.is_armed = True
        try:
            yield
        finally:
            self.is_armed = False

    @contextmanager
    def together(self, in_step: bool = False) -> Iterator[None]:
        """Work that every process begins, and in which none meets another before `settle`, or before the end.

        With `in_step` they meet throughout, and each calls this interruption as often as the others: they agree each time.
        """
        if self.agree is None or not self.is_armed:
            yield
            return
        self._is_apart, self._is_in_step = not in_step, in_step
        try:
            yield
            self.settle()
        except StopNow:
            if self._is_apart:
                self._is_apart = False
                self.agree(True)
            raise
        finally:
            self._is_apart = self._is_in_step = False

    def settle(self) -> None:
        """The first meeting of this work: raises StopNow on every process if one has left; from here on, none does."""
        if self._is_apart and self.agree is not None:
            self._is_apart = False
            if self.agree(False):
                raise StopNow
