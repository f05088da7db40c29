"""A teacher's signal in a recorded step: where it pulls, and how far it agrees with the reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from covey.errors import RunFolderError
from covey.monitor.view.token_text import pieces

COLUMN = "token/teacher_gap"
MOST = 3
"""Tokens shown in each direction."""


@dataclass(frozen=True)
class Pull:
    """A token of a completion, with the teacher's log-probability minus the policy's there."""

    group: int
    completion: int
    token: str
    gap: float
    advantage: float


@dataclass(frozen=True)
class TeacherSignal:
    """Signal of a step: mean gap in nats a token, completions with one, and the tokens of its largest pulls.

    Of a teacher of another tokenizer the tokens in aligned spans alone count.
    """

    gap: float
    informed: int
    completions: int
    agreement: float | None
    """From -1 to 1, as the metric `teacher/agreement`; None where all rewards are equal."""
    up: tuple[Pull, ...]
    down: tuple[Pull, ...]

    def lines(self) -> list[str]:
        """The signal in words."""
        agreement = (
            "no rewards differ" if self.agreement is None else f"agreement with the reward {self.agreement:+.2f}"
        )
        of = f"{self.informed} of {self.completions} completions"
        out = [f"teacher: a signal on {of}, {self.gap:+.3g} nats a token (log q - log p), {agreement}"]
        for word, pulls in (("up", self.up), ("down", self.down)):
            out += [
                f"  pulls {word} {pull.gap:+.2f} at {pull.token!r}, completion {pull.completion} of group {pull.group}, advantage {pull.advantage:+.2f}"
                for pull in pulls
            ]
        return out

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def signal_of(rows: Sequence[Mapping[str, Any]], tokenizer: Path) -> TeacherSignal | None:
    """The signal that a step's rollouts recorded; None without a teacher. `tokenizer`: its file, for the texts of tokens."""
    measured = [row for row in rows if row.get(COLUMN)]
    if not measured:
        return None
    raw = [np.array(row[COLUMN], float) for row in measured]
    counts = [int((_written(row) & ~np.isnan(gap)).sum()) for row, gap in zip(measured, raw, strict=True)]
    gaps = [np.where(_written(row), np.nan_to_num(gap), 0.0) for row, gap in zip(measured, raw, strict=True)]
    means = np.array([gap.sum() / max(1, int(_written(row).sum())) for gap, row in zip(gaps, measured, strict=True)])
    pull = means * np.array([row["advantage"] or 0.0 for row in measured])
    informed = [bool(gap.any()) for gap in gaps]
    tokens = sum(count for count, has_signal in zip(counts, informed, strict=True) if has_signal)
    places = sorted(
        ((float(value), r, t) for r, gap in enumerate(gaps) for t, value in enumerate(gap) if value), reverse=True
    )
    shown = lambda some: tuple(_pull(measured[r], t, value, tokenizer) for value, r, t in some)
    return TeacherSignal(
        gap=float(sum(gap.sum() for gap in gaps)) / max(1, tokens),
        informed=sum(informed),
        completions=len(rows),
        agreement=float(pull.sum() / np.abs(pull).sum()) if np.abs(pull).sum() > 0 else None,
        up=shown([place for place in places[:MOST] if place[0] > 0]),
        down=shown([place for place in reversed(places[-MOST:]) if place[0] < 0]),
    )


def _written(row: Mapping[str, Any]) -> np.ndarray:
    mask = row.get("mask")
    return np.ones(len(row["token_ids"]), bool) if mask is None else np.array(mask, bool)


def _pull(row: Mapping[str, Any], place: int, gap: float, tokenizer: Path) -> Pull:
    try:
        token = pieces(tokenizer, row["token_ids"])[place]
    except RunFolderError:  # a tokenizer of another form: the token's number stands for it
        token = str(row["token_ids"][place])
    return Pull(int(row["group"]), int(row["completion_index"]), token, gap, float(row["advantage"] or 0.0))
