"""One reward on one batch: score, abstain or error for each completion, and the offenders found by halving."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from covey.errors import RewardError
from covey.process.interruption import StopNow
from covey.raised import describe, is_ctrl_c, kind_of, place_of, traceback_of
from covey.rewards.calling.deadline import DeadlineError
from covey.rewards.contract import Batch, Logged, to_number, to_scores
from covey.types import Event

Attempt = Callable[[Batch, "float | None"], tuple[Any, Logged]]
"""Calls a reward on a batch with a time limit in seconds, and returns its result and its logged values, or raises."""

_EVENTS_IN_FULL = 5
_LIMITS_IN_ALL = 3
"""Time limits after which nothing of a batch is asked again."""
_TRIES = 2
"""Calls of a single completion that raises."""
_LOST_IN_A_ROW = 3
"""Lost calls after which the rest of a batch is not called."""
_TEXT_IN_EVENT = 2000


class CircuitOpen(Exception):  # noqa: N818 - a state, reported as the reason of an unscored completion
    """Not called, because the calls before it in this batch were all lost."""


@dataclass(frozen=True)
class Failure:
    """Completions `start` to `stop` that a reward could not score, and why."""

    start: int
    stop: int
    error: BaseException


@dataclass
class Outcome:
    """Scores of one reward for N completions, with its errors and timings."""

    name: str
    scores: Tensor
    """[N] float32, NaN where it abstained or failed."""
    failures: list[Failure] = field(default_factory=list)
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """Columns from `log_extra`, [N] each, None where nothing was logged."""
    metrics: list[tuple[str, float]] = field(default_factory=list)
    notices: list[Event] = field(default_factory=list)
    """Events of the call that cost no completion its score."""
    seconds: float = 0.0
    """Spent inside calls, which may overlap."""
    num_calls: int = 0
    num_cached: int = 0
    """Completions whose score was known from an earlier call."""

    @property
    def num_failed(self) -> int:
        return sum(failure.stop - failure.start for failure in self.failures)

    @property
    def is_lost(self) -> bool:
        """True when not one completion got an answer, not even an abstention."""
        return self.num_failed == len(self.scores) > 0

    def keep(self, start: int, values: list[Any], logged: Logged) -> None:
        """Take over the values of completions `start` onwards; a value that is no number is that completion's failure."""
        for i, value in enumerate(values, start):
            try:
                self.scores[i] = to_number(value, f"the score of completion {i}")
            except (RewardError, ValueError) as error:
                self.failures.append(Failure(i, i + 1, error))
        for column, extra in logged.extras.items():
            self.extras.setdefault(column, [None] * len(self.scores))[start : start + len(extra)] = extra
        self.metrics += logged.metrics

    @staticmethod
    def joined(name: str, parts: Sequence[tuple[Sequence[int], Outcome]], size: int) -> Outcome:
        """The outcome of `size` completions from those of parts, each with the places its completions have in the whole."""
        whole = Outcome(name, torch.full((size,), math.nan))
        for places, part in parts:
            whole.scores[torch.as_tensor(places, dtype=torch.long)] = part.scores
            for failure in part.failures:  # a part's completions need not be neighbours in the whole
                indices = places[failure.start : failure.stop]
                whole.failures += (
                    [Failure(indices[0], indices[-1] + 1, failure.error)]
                    if list(indices) == list(range(indices[0], indices[-1] + 1))
                    else [Failure(place, place + 1, failure.error) for place in indices]
                )
            for column, values in part.extras.items():
                target = whole.extras.setdefault(column, [None] * size)
                for place, value in zip(places, values, strict=True):
                    target[place] = value
            whole.metrics += part.metrics
            whole.notices += part.notices
            whole.seconds += part.seconds
            whole.num_calls += part.num_calls
            whole.num_cached += part.num_cached
        return whole

    def events(self, batch: Batch) -> list[tuple[int, Event]]:
        """An event for each failure with the index of the completion it concerns; the first few carry everything."""
        shown = [(0, event) for event in self.notices]
        shown += [(failure.start, _event(self.name, failure, batch)) for failure in self.failures[:_EVENTS_IN_FULL]]
        hidden: dict[str, list[Failure]] = {}
        for failure in self.failures[_EVENTS_IN_FULL:]:
            hidden.setdefault(kind_of(failure.error), []).append(failure)
        for kind, failures in hidden.items():
            count = sum(f.stop - f.start for f in failures)
            which = f" with {kind}" if len(hidden) > 1 else ""
            sentence = f"Reward {self.name!r} failed on {count} more completions of this batch{which}."
            details = {"reward": self.name, "completions": count, "error": kind}
            shown.append((failures[0].start, Event(kind="reward_error", said=sentence, details=details)))
        return shown


def logged_columns(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Columns from `log_extra` of several rewards; one that two of them have is there by both names."""
    extras = dict[str, list[Any]]()
    for outcome in outcomes:
        for column, values in outcome.extras.items():
            before = extras.get(column, values)
            extras[column] = [new if old is None else old for old, new in zip(before, values, strict=True)]
            if before is not values:
                extras[f"{column} ({outcome.name})"] = values
    return extras


def evaluate(
    name: str, attempt: Attempt, batch: Batch, *, seconds: float | None, isolate: bool, asks_again: bool = True
) -> Outcome:
    """Score a batch. A call that raises, or runs past its limit, is repeated on halves, so that only the completions at fault lose their scores.

    A call may take `seconds`. After one that raised, halves are asked until half of that is spent, and a single completion twice,
    since a judge may fail by chance. After one that was late, halves get up to twice their share of the limit: a reward
    that needs up to twice the limit for the whole batch is heard out, and one completion that hangs is found for three limits in
    all. Nothing is asked again once two halves of one part were both late, with `isolate=False`, or where the late call
    cannot be ended; with `asks_again=False`, no late call is.
    """
    outcome = Outcome(name, torch.full((len(batch),), math.nan))
    started = time.monotonic()
    until = started + (math.inf if seconds is None else seconds / 2)
    todo = deque([_Part(0, len(batch))])
    while todo:
        part = todo.popleft()
        try:
            returned, logged = attempt(batch.take(range(part.start, part.stop)), _limit(part.size, len(batch), seconds))
            values = to_scores(returned, part.size, name)
        except BaseException as error:  # the border to user code: reported, counted, limited
            if isinstance(error, StopNow) or is_ctrl_c(error):
                raise
            lost = [part]
            if isinstance(error, DeadlineError):
                until = started + _LIMITS_IN_ALL * (seconds or math.inf)
                part.late.append(part)
                if len(part.late) == 2:
                    lost, todo = [part, *todo], deque()
                elif isolate and asks_again and part.size > 1 and not error.is_running and time.monotonic() < until:
                    lost, todo = [], todo + deque(part.halves())
            elif isolate and part.can_help_again(error) and time.monotonic() < until:
                lost, todo = [], deque(part.again()) + todo
            outcome.failures += [Failure(piece.start, piece.stop, error) for piece in lost]
            continue
        outcome.keep(part.start, values, logged)
    outcome.failures = _join_late(outcome.failures)
    return outcome


@dataclass(frozen=True)
class _Part:
    """Completions `start` to `stop`, to be asked about."""

    start: int
    stop: int
    tries: int = 1
    late: list[_Part] = field(default_factory=list)
    """Late calls of this part and its twin."""

    @property
    def size(self) -> int:
        return self.stop - self.start

    def can_help_again(self, error: BaseException) -> bool:
        """True if its halves, or one more try, may fare better; halves of a wrong length would be misaligned."""
        return not isinstance(error, RewardError | CircuitOpen) and (self.size > 1 or self.tries < _TRIES)

    def again(self) -> list[_Part]:
        """After it raised: the halves, or a single completion once more."""
        return [replace(self, tries=self.tries + 1)] if self.size == 1 else self.halves()

    def halves(self) -> list[_Part]:
        middle, late = (self.start + self.stop) // 2, list[_Part]()
        return [_Part(self.start, middle, late=late), _Part(middle, self.stop, late=late)]


def _join_late(failures: Sequence[Failure]) -> list[Failure]:
    """In order of their completions, neighbours that were lost to a time limit as one."""
    joined: list[Failure] = []
    for current in sorted(failures, key=lambda failure: failure.start):
        last = joined[-1] if joined else None
        if (
            last
            and last.stop == current.start
            and isinstance(last.error, DeadlineError)
            and isinstance(current.error, DeadlineError)
        ):
            joined[-1] = Failure(last.start, current.stop, last.error)
        else:
            joined.append(current)
    return joined


def _limit(size: int, whole: int, seconds: float | None) -> float | None:
    """Seconds for a call about `size` of `whole` completions: twice its share, not too little for the way to a server."""
    return None if seconds is None else min(seconds, max(2.0 * seconds * size / whole, seconds / 16))


def _event(name: str, failure: Failure, batch: Batch) -> Event:
    error, count = failure.error, failure.stop - failure.start
    whom = "a completion" if count == 1 else f"{count} completions"
    late = isinstance(error, TimeoutError)
    return Event(
        kind="reward_timeout" if late else "reward_error",
        said=f"Reward {name!r} did not score {whom}: {describe(error)}.",
        details={
            "reward": name,
            "completions": count,
            "error": kind_of(error),
            "at": place_of(error),
            "traceback": traceback_of(error),
            "prompt": _text(batch.prompts[failure.start]),
            "completion": _text(batch.completions[failure.start]),
        },
    )


def _text(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else str(value)
    except Exception:  # noqa: BLE001 - an object of the data set's own
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _TEXT_IN_EVENT else text[:_TEXT_IN_EVENT] + f" [... {len(text)} characters]"


class Breaker:
    """After three lost calls in a row the rest of the batch is not called: 64 groups do not wait 64 time limits.

    The next batch tries again, and one lost call is enough then; a call that comes back closes the circuit.
    """

    def __init__(self) -> None:
        self._lost = 0
        self._is_open = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """A new batch: half open where the last one ended open."""
        with self._lock:
            self._lost = _LOST_IN_A_ROW - 1 if self._is_open else 0
            self._is_open = False

    def refuse(self, name: str) -> None:
        """Raise CircuitOpen while the circuit is open."""
        if self._is_open:
            raise CircuitOpen(
                f"not called, because reward {name!r} lost {_LOST_IN_A_ROW} calls in a row; the next batch tries it again"
            )

    def note(self, outcome: Outcome) -> None:
        """Count a call that was wholly lost to a time limit or a connection; an answer of any kind starts again at 0."""
        is_lost = outcome.is_lost and all(isinstance(failure.error, OSError) for failure in outcome.failures)
        with self._lock:
            self._lost = self._lost + 1 if is_lost else 0
            self._is_open = self._is_open or self._lost >= _LOST_IN_A_ROW
