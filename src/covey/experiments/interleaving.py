"""Several runs in one process, interleaved step by step; process-wide state is saved and restored for each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from covey.process import rng
from covey.training.loop import Steps

T = TypeVar("T")


class Member(Generic[T]):
    """One of several interleaved runs, with its own random generators, stdout and stderr."""

    def __init__(
        self, name: str, steps: Steps[T], within: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """`within` makes a context for each `advance`."""
        self.name = name
        self.steps = steps
        self._within = within
        self.result: T | None = None
        self.error: Exception | None = None
        self.has_ended = False
        self._random: Mapping[str, Any] | None = None
        self._streams: tuple[Any, Any] | None = None

    def advance(self) -> None:
        """Run until the end of the next step, or the end. An error ends this run, and is kept in `error`."""
        with self._within():
            self._advance()

    def _advance(self) -> None:
        outer = sys.stdout, sys.stderr
        if self._random is not None:
            rng.restore(self._random)
        sys.stdout, sys.stderr = self._streams or (Labelled(outer[0], self.name), Labelled(outer[1], self.name))
        try:
            next(self.steps)
        except StopIteration as ended:
            self.result, self.has_ended = ended.value, True
        except Exception as error:  # noqa: BLE001 - kept, and raised or reported when the others have ended
            self.error, self.has_ended = error, True
        finally:
            self._random, self._streams = rng.snapshot(), (sys.stdout, sys.stderr)
            sys.stdout, sys.stderr = outer


class Rounds(Generic[T]):
    """Interleaved members: a round is an optimizer step of each. Others may join between two rounds.

    On leaving, the random generators of the process are restored, and members that have not ended are closed.
    """

    def __init__(self, members: Iterable[Member[T]] = ()) -> None:
        self.running = list(members)
        self._before = rng.snapshot()

    def __enter__(self) -> Rounds[T]:
        return self

    def __exit__(self, *error: object) -> None:
        for member in self.running:
            member.steps.close()
        rng.restore(self._before)

    def next(self) -> Iterator[Member[T]]:
        """The next round; yields each member after its step."""
        for member in list(self.running):
            member.advance()
            if member.has_ended:
                self.running.remove(member)
            yield member


def interleave(members: Iterable[Member[T]], ended: Callable[[Member[T]], None] = lambda member: None) -> None:
    """Run one step of each member, round after round, until all have ended; `ended` is called with each."""
    with Rounds(members) as rounds:
        while rounds.running:
            for member in rounds.next():
                if member.has_ended:
                    ended(member)


class Labelled:
    """A text stream that begins each line with the name of a run; never a terminal, so that no progress bar is redrawn."""

    def __init__(self, stream: Any, name: str) -> None:
        self._stream, self._name = stream, name
        self._is_new_line = True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self._stream.write(f"{self._name}: {line}" if self._is_new_line else line)
            self._is_new_line = line.endswith("\n")
        return len(text)

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
