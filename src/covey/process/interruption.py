"""Interruption of a step by a stop signal, between tokens or micro-batches, so that a checkpoint is written in time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from covey.process.world import World

T = TypeVar("T")


class StopNow(BaseException):
    """Abort of the current step after a stop signal; not an error, and caught by the training loop and the trial of a sampler only."""


def on_main(world: World, work: Callable[[], T], otherwise: Exception) -> T | None:
    """Result of `work` on the main process, None elsewhere. Collective.

    An exception of `work` ends all: the main process raises it, the others `otherwise`; a StopNow is raised on every process.
    """
    ended: BaseException | None = None
    result: T | None = None
    if world.is_main:
        try:
            result = work()
        except (Exception, StopNow) as error:  # noqa: BLE001 - raised once every process has heard of it
            ended = error
    outcome = world.max(0 if ended is None else 1 + isinstance(ended, StopNow))
    if outcome == 2:
        raise ended or StopNow
    if outcome == 1:
        raise ended or otherwise
    return result


@dataclass
class Interruption:
    """Callable that raises StopNow once `is_requested()`, but only inside `armed()`; called where work can be aborted.

    With several processes, one that stopped alone would leave the others waiting in their next collective. There it raises inside
    `together()` only, and all processes stop where one has.
    """

    is_requested: Callable[[], bool] = lambda: False
    agree: Callable[[bool], bool] | None = None
    """Collective logical or over processes; None: a single process."""
    is_armed: bool = False
    _is_apart: bool = False
    """True while this process may stop alone, before the next collective."""
    _is_in_step: bool = False
    """True while all processes call this equally often, so that each call can be a collective."""
    _is_in_evaluation: bool = False

    def __call__(self) -> None:
        if not self.is_armed:
            return
        if self._is_in_step and self.agree is not None:
            if self.agree(self.is_requested()):
                raise StopNow
        elif (self.agree is None or self._is_apart) and self.is_requested():
            raise StopNow

    def agrees(self, flag: bool) -> bool:
        """Logical or of `flag` over processes, amid work that each does apart. Raises StopNow on every process if one has stopped."""
        if self.agree is None:
            return flag
        is_apart = self._is_apart
        self.settle()
        agreed = self.agree(flag)
        self._is_apart = is_apart
        return agreed

    def while_waiting(self) -> None:
        """Like a call, but raises inside `evaluating()` too; for waits that end on all processes together, such as for a lost server."""
        if self._is_in_evaluation and self.is_requested():
            raise StopNow
        self()

    def when_apart(self) -> None:
        """Like a call, but never a collective: for waits that take the processes unequally long."""
        if not self._is_in_step:
            self()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context of an evaluation, in which a wait of all processes together hears a stop too."""
        self._is_in_evaluation = True
        try:
            yield
        finally:
            self._is_in_evaluation = False

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Context whose work can be aborted without side effects."""
        self.is_armed = True
        try:
            yield
        finally:
            self.is_armed = False

    @contextmanager
    def together(self, in_step: bool = False) -> Iterator[None]:
        """Context for work that every process starts, without collectives before `settle`, `agrees` or the end.

        With `in_step` the work has collectives throughout, and all processes call this interruption equally often, as a collective.
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
        """Before the first collective of the work: raises StopNow on every process if one has stopped; after it, none stops alone."""
        if self._is_apart and self.agree is not None:
            self._is_apart = False
            if self.agree(False):
                raise StopNow
