"""Pivots: single turns of expert trajectories as prompts, whose answer is the expert's turn. PivotRL, 2026, <https://arxiv.org/abs/2603.21383>."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.data.layouts import messages_of, tools_for_template
from covey.data.rendering import as_written, content_text
from covey.doctor.data_check.clean_copy import appearing
from covey.doctor.data_check.rows import Rows
from covey.errors import DataError

COLUMNS = ("messages", "conversations", "conversation", "trajectory")
"""Columns that are looked for, in this order."""


@dataclass(frozen=True)
class Chosen:
    """Turns of a trajectory that become pivots."""

    column: str | None = None
    """Column of the messages; None: the first of `COLUMNS` that is there."""
    tool_calls_only: bool = False
    success_column: str | None = None
    """Column that is true, or a reward of 1 at least, in trajectories of an expert; others are left out."""


def pivots_of(row: Mapping[str, Any], chosen: Chosen, place: int) -> list[dict[str, Any]]:
    """A row for each turn of the assistant: `prompt`, the messages before it; `answer`, its text; `tool_calls`, its calls as JSON.

    `trajectory` and `turn` say where it is from; other columns of the row stay. Raises DataError without messages.
    """
    column = chosen.column or next((name for name in COLUMNS if row.get(name)), None)
    messages = _messages(row, place, column)
    others = {name: value for name, value in row.items() if name not in (column, "prompt", "answer", "system")}
    others |= tools_for_template(row)
    pivots = []
    for turn, message in enumerate(messages):
        calls = message.get("tool_calls") or []
        is_empty = not calls and not content_text(message.get("content")).strip()
        if message["role"] != "assistant" or not turn or is_empty or (chosen.tool_calls_only and not calls):
            continue
        expert = {"answer": message.get("content") or "", "tool_calls": json.dumps(calls, ensure_ascii=False)}
        pivots.append({**others, "prompt": messages[:turn], **expert, "trajectory": place, "turn": turn})
    return pivots


def _messages(row: Mapping[str, Any], place: int, column: str | None) -> list[dict[str, Any]]:
    """Messages in OpenAI's form, from it, from ShareGPT's, or from the text of either."""
    value = row.get(column) if column else None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    is_list = isinstance(value, list) and all(isinstance(message, Mapping) for message in value)
    messages = messages_of({**row, str(column): value}, str(column)) if is_list else []
    if not messages or not all(isinstance(message["role"], str) and message["role"] for message in messages):
        name = f"the column {column!r}" if column else f"one of the columns {', '.join(COLUMNS)}"
        raise DataError(
            f"Row {place} holds no list of messages with roles in {name}; name the column with --messages-column."
        )
    return messages


def _is_success(row: Mapping[str, Any], chosen: Chosen, place: int) -> bool:
    if chosen.success_column is None:
        return True
    if chosen.success_column not in row:
        raise DataError(f"Row {place} has no column {chosen.success_column!r}; it has {', '.join(row)}.")
    value = row[chosen.success_column]
    return value if isinstance(value, bool) else isinstance(value, (int, float)) and value >= 1


def write_pivots(rows: Rows, chosen: Chosen, output: Path) -> Counter[str]:
    """Write the pivots of all rows, whole or not at all. Returns counts of `trajectories`, `failed` ones, and `pivots`.

    Raises DataError for a row that is no trajectory, and where there are no pivots.
    """
    counts = Counter[str]()
    with appearing(output) as (file,):
        for pivot in _pivots(rows, chosen, counts):
            counts["pivots"] += 1
            file.write(json.dumps(pivot, ensure_ascii=False, default=str).encode() + b"\n")
        if not counts["pivots"]:
            what = "with tool calls " if chosen.tool_calls_only else ""
            raise DataError(
                f"{rows.source} has no turn of the assistant {what}behind another message, so there are no pivots."
            )
    return counts


def _pivots(rows: Rows, chosen: Chosen, counts: Counter[str]) -> Iterator[dict[str, Any]]:
    for record in rows:
        if record.row is None:
            raise DataError(
                f"Row {record.number} of {rows.source} is {record.fault}; covey data check shows all of them."
            )
        counts["trajectories"] += 1
        if not _is_success(record.row, chosen, record.number):
            counts["failed"] += 1
            continue
        row = as_written(record.row, None if record.line is None else {})
        yield from pivots_of(row, chosen, record.number)
