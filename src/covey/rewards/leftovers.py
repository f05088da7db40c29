"""Leftovers of rewards at the end of a batch: changed process-wide settings, un-awaited tasks, threads."""

import logging
import threading
from collections.abc import Iterable, Mapping

from covey.types import Event

logger = logging.getLogger(__name__)

_MANY_THREADS = 64


_OURS = ("covey-", "AnyIO ")
"""Beginnings of the names of threads that a run starts itself: agents, and the endpoint that they talk to."""


def _num_threads() -> int:
    return sum(not thread.name.startswith(_OURS) for thread in threading.enumerate())


class Leftovers:
    """Reports each kind of leftover once for each reward, as an event and as a warning."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str]] = set()
        self._threads = _num_threads()

    def events(self, changed: Iterable[tuple[str, str]], tasks: Mapping[str, int]) -> list[Event]:
        """Events for restored state (name of the reward or "", the name of the setting), cancelled tasks, and threads."""
        problems = [(name, "reward_side_effect", what, f"changed {what}, which was put back") for name, what in changed]
        problems += [
            (
                name,
                "reward_tasks_left",
                "tasks",
                f"left {count} task(s) running, which were cancelled; await what it starts",
            )
            for name, count in tasks.items()
        ]
        more = _num_threads() - self._threads
        if more >= _MANY_THREADS:
            phrase = f"left {more} threads running, which cannot be ended from outside; join what it starts"
            problems.append(("", "reward_threads_left", "threads", phrase))
        return [
            self._event_of(name, kind, what, phrase)
            for name, kind, what, phrase in problems
            if (name, what) not in self._reported
        ]

    def _event_of(self, name: str, kind: str, what: str, phrase: str) -> Event:
        self._reported.add((name, what))
        sentence = f"Reward {name!r} {phrase}." if name else f"A reward {phrase}."
        logger.warning("%s It is told once.", sentence)
        return Event(kind=kind, said=sentence, details={"reward": name})
