"""Prompt replay: rarely solved prompts come again sooner than in the plain order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from covey.data.order import Order, Outcome, Row
from covey.errors import DataError

_SHARE = 0.25
_RARELY = 0.5
"""Mean reward, 1 for full marks, below which a prompt counts as solved rarely."""
_PATIENCE = 3
"""Replays in a row without signal after which a prompt leaves: a rare success is often missed once."""
_GAP, _GAP_SHARE = 256, 10
"""Draws that lie between two of the same row: so many, or a tenth of the rows if that is fewer; practice is best spaced."""
_NAMED = re.compile(r"(?:(?P<base>.+)\+)?replay(?::(?P<share>[^+]*))?")


def parted(curriculum: str) -> tuple[str, float | None]:
    """The curriculum without its replay, and the share of replays: `difficulty+replay:0.3` is `("difficulty", 0.3)`.

    None: no replay. Raises DataError for a share that is none.
    """
    match = _NAMED.fullmatch(curriculum)
    if match is None:
        return curriculum, None
    try:
        share = _SHARE if match["share"] is None else float(match["share"])
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise DataError(
            f"curriculum={curriculum!r}: the share of prompts that are replays lies between 0 and 1, as in replay:0.25."
        )
    return match["base"] or "none", share


class Replay:
    """Another order, in which up to `share` of the draws are rows that were solved rarely, the one not seen for longest first.

    A row enters when its group had both right and wrong answers and scored below one half; it leaves when it scores that or
    more, or had no signal in three replays. A row is not replayed before its last draw was judged and 256 draws, or a tenth of
    the rows, have passed. Where too few rows wait, the base order fills in. `epoch` is the base order's, so an epoch still has
    every row of it.
    """

    def __init__(self, dataset: Any, base: Order, share: float) -> None:
        self.dataset, self.base, self.share = dataset, base, share
        self._gap = min(_GAP, (base.num_rows or 0) // _GAP_SHARE)
        self._waiting: dict[int, tuple[int, int]] = {}
        """Rows that were solved rarely, with their replays without signal since, and when they were judged; longest ago first."""
        self._drawn, self._replayed = 0, 0
        self._unjudged: dict[int, int] = {}
        """Rows of the pool that were replayed since the last outcomes, and their replays without signal."""

    @property
    def num_rows(self) -> int | None:
        return self.base.num_rows

    @property
    def epoch(self) -> float:
        return self.base.epoch

    def next(self) -> tuple[str, Row]:
        """The uid and the row of the next draw; a replay's uid is `r0:row`, counting replays."""
        self._drawn += 1
        row, (dull, since) = next(iter(self._waiting.items()), (-1, (0, self._drawn)))  # the last of these is never due
        if self._drawn - since > self._gap and self._replayed + 1 <= self.share * self._drawn:
            del self._waiting[row]
            self._unjudged[row] = dull
            self._replayed += 1
            return f"r{self._replayed - 1}:{row}", self.dataset[row]
        return self.base.next()

    def learn(self, outcomes: Mapping[int, Outcome]) -> None:
        """Record the outcomes of rows, and pass them on to an order that adapts to them."""
        for row, outcome in outcomes.items():
            dull = self._unjudged.pop(row, self._waiting.pop(row, (None, 0))[0])
            if outcome.score >= _RARELY:
                continue
            if outcome.has_signal:
                self._waiting[row] = (0, self._drawn)
            elif dull is not None and dull + 1 < _PATIENCE:
                self._waiting[row] = (dull + 1, self._drawn)
        learn = getattr(self.base, "learn", None)
        if learn is not None:
            learn(outcomes)

    def state_dict(self) -> dict[str, Any]:
        waiting = [[row, dull, since] for row, (dull, since) in self._waiting.items()]
        unjudged = [[row, dull] for row, dull in self._unjudged.items()]
        counts = {"drawn": self._drawn, "replayed": self._replayed}
        return {"base": self.base.state_dict(), **counts, "waiting": waiting, "unjudged": unjudged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.base.load_state_dict(state["base"])
        self._drawn, self._replayed = int(state["drawn"]), int(state["replayed"])
        self._waiting = {int(row): (int(dull), int(since)) for row, dull, since in state["waiting"]}
        self._unjudged = {int(row): int(dull) for row, dull in state["unjudged"]}
