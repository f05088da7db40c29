"""Soak test: every fault for an equal share of the time, and a table of the outcomes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from soak.bench import Bench
from soak.kinds import FAULTS, Outcome


@dataclass
class Tally:
    """One row of the table."""

    fault: str
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    tries: int = 0
    """With those that came late, after the run had ended."""

    @property
    def survived(self) -> int:
        return sum(one.survived for one in self.outcomes)

    @property
    def lost(self) -> list[int]:
        return [one.lost for one in self.outcomes]

    def to_json(self) -> dict[str, Any]:
        lost = self.lost or [0]
        return {
            "fault": self.fault,
            "injected": len(self.outcomes),
            "survived": self.survived,
            "lost_mean": round(sum(lost) / len(lost), 2),
            "lost_most": max(lost),
            "seconds": round(self.seconds, 1),
            "wrong": [one.said for one in self.outcomes if not one.survived],
        }


def soak(
    bench: Bench,
    faults: Sequence[str],
    *,
    minutes: float,
    count: int,
    tell: Callable[[str, Outcome], None] = lambda fault, outcome: None,
) -> list[Tally]:
    """Inject faults, that which has had the least time first, each at most `count` times, starting none after `minutes`.

    `tell` is called with each one.
    """
    tallies = [Tally(fault) for fault in faults]
    deadline = time.monotonic() + 60 * minutes
    while time.monotonic() < deadline:
        waiting = [tally for tally in tallies if tally.tries < count]
        if not waiting:
            break
        tally = min(waiting, key=lambda one: one.seconds)
        started = time.monotonic()
        outcome = FAULTS[tally.fault](bench)
        tally.tries += 1
        tally.seconds += time.monotonic() - started
        if not outcome.came_late:
            tally.outcomes.append(outcome)
        tell(tally.fault, outcome)
        bench.clear_last(keep=not outcome.survived)
    return tallies
