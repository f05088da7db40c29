"""Every fault in turn, until the time or the count is used up, and a table of what became of the runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from covey.faults.bench import Bench
from covey.faults.kinds import FAULTS, Outcome


@dataclass
class Tally:
    """One row of the table."""

    fault: str
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

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
    """Inject each fault in turn, at most `count` times each, starting none after `minutes`. `tell` hears of each one."""
    tallies = [Tally(fault) for fault in faults]
    deadline = time.monotonic() + 60 * minutes
    for _ in range(count):
        for tally in tallies:
            if time.monotonic() >= deadline:
                return tallies
            started = time.monotonic()
            outcome = FAULTS[tally.fault](bench)
            if not outcome.came_late:
                tally.outcomes.append(outcome)
            tally.seconds += time.monotonic() - started
            tell(tally.fault, outcome)
            bench.clear_last(keep=not outcome.survived)
    return tallies
