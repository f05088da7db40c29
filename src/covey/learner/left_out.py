"""A completion that does not fit in memory even alone is left out of its step, not the step out of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from covey.learner.packing import Row
from covey.types import Metric, Sum

_SHARE = 8
"""At most one completion in so many: a step of which more is missing would teach something else."""


@dataclass(eq=False)
class SkippedCompletions:
    """The completions that a step had to do without. Their share of the gradient is zero; denominators still count them."""

    most: int = 0
    """How many may be left out; 0: none."""
    rows: list[Row] = field(default_factory=list)

    def begin(self, num_rows: int) -> None:
        """A step of `num_rows` completions: one in eight may be left out, and one in any case if there are several."""
        self.most, self.rows = max(1, num_rows // _SHARE) if num_rows > 1 else 0, []

    def end(self) -> dict[str, Metric]:
        """After the step: how many were left out on this process, if any. From now on none may be."""
        self.most, rows = 0, self.rows
        self.rows = []
        return {"completions/left_out": Sum(float(len(rows)))} if rows else {}

    def take(self, row: Row) -> bool:
        """Leave this one out; False when too many are already."""
        if len(self.rows) >= self.most:
            return False
        self.rows.append(row)
        return True

    def without(self, rows: Sequence[Row]) -> list[Row]:
        """`rows`, less those that were left out."""
        return [row for row in rows if not any(row is gone for gone in self.rows)]


def sentence(row: Row) -> str:
    """What the run says of it."""
    return (
        f"A completion of {row.completion.num_tokens} tokens to prompt {row.prompt.uid} ({row.num_tokens} tokens together) does not fit "
        "in memory even alone. It is left out of this step, and the others keep their share; lower max_completion_length to learn from all."
    )
