"""The small files of a run, `alerts.jsonl` and `events.jsonl`, malformed lines included."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from covey.monitor.view.latest import Latest
from covey.runs.metrics import parse

_MOST_BYTES = 8 << 20
_MOST_ROWS = 5000
_LONGEST = 4000


class Records:
    """The rows of one log, read again when it has changed; of a long log the end.

    `shape` maps a parsed line to a row of the known form, or None where it does not fit.
    """

    def __init__(self, path: Path, shape: Callable[[Mapping[str, Any]], dict[str, Any] | None]) -> None:
        self._shape = shape
        self._file = Latest(path, self._read)

    def rows(self) -> list[dict[str, Any]]:
        """All rows that are whole, oldest first."""
        return (self._file.read().content or ([], False))[0]

    @property
    def trouble(self) -> str | None:
        """Reason why records are missing; None when all are read."""
        now, name = self._file.read(), self._file.path.name
        if now.trouble:
            return f"{name} cannot be read: {now.trouble}."
        return f"{name} is long; only its end is shown." if now.content and now.content[1] else None

    def _read(self, file: BinaryIO) -> tuple[list[dict[str, Any]], bool]:
        """The rows, and True if earlier ones are left out."""
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _MOST_BYTES))
        lines = file.read(_MOST_BYTES).splitlines(keepends=True)[size > _MOST_BYTES :]
        rows = [row for line in lines if (row := parse(line)) is not None]
        shaped = [row for row in map(self._shape, rows) if row is not None]
        return shaped[-_MOST_ROWS:], size > _MOST_BYTES or len(shaped) > _MOST_ROWS


def alert_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Step, rule, severity, said, evidence and try_this of an alert; None for a row that is none."""
    step, sentence = row.get("step"), row.get("said")
    if not is_step(step) or not isinstance(sentence, str):
        return None
    severity = row.get("severity")
    evidence, advice = row.get("evidence"), row.get("try_this")
    return {
        "step": step,
        "rule": text_of(row.get("rule")),
        "severity": severity if severity in ("error", "warning", "info") else "info",
        "said": sentence[:_LONGEST],
        "evidence": {str(name): shown(value) for name, value in evidence.items()} if isinstance(evidence, dict) else {},
        "try_this": [hint[:_LONGEST] for hint in advice if isinstance(hint, str)] if isinstance(advice, list) else [],
    }


def event_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Step, kind, said; None for a line that is no event."""
    if not is_step(row.get("step")):
        return None
    return {"step": row["step"], "kind": text_of(row.get("kind")), "said": text_of(row.get("said"))}


def is_step(value: Any) -> bool:
    """True if the value can be the number of a step."""
    return type(value) is int and 0 <= value <= 2**53


def text_of(value: Any) -> str:
    """A text as it is, cut at 4000 characters; nothing for anything else."""
    return value[:_LONGEST] if isinstance(value, str) else ""


def cut(text: str, most: int) -> str:
    """The first `most` characters, and how many more there are."""
    return text if len(text) <= most else f"{text[:most]}\n[{len(text) - most:,} more characters are not shown]"


def shown(value: Any) -> Any:
    """A number, a text or nothing as it is; anything larger as text, cut at 4000 characters with a note."""
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) <= 2**53):
        return value
    try:
        return cut(value if isinstance(value, str) else str(value), _LONGEST)
    except (ValueError, RecursionError):  # a number of thousands of digits, lists in lists
        return "…"
