"""Groups whose text contains what is looked for: a bounded piece of work a request, and where to go on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from covey.view.groups import GroupIndex

_CHUNK = 4096


@dataclass(frozen=True)
class Found:
    """What a part of a search found."""

    places: list[int]
    """Groups that match, as places in the table, in the order that was asked for."""
    at: int
    """How many groups of the order have been looked at; the next part starts here."""
    is_done: bool


def search(
    index: GroupIndex,
    table: np.ndarray,
    order: np.ndarray,
    text: str,
    *,
    start: int = 0,
    most: int = 50,
    seconds: float = 0.06,
) -> Found:
    """Look through `order` [k] (places in `table`) from `start` for `text` in prompts and completions, case ignored.

    Ends once `most` groups are found, or `seconds` have passed and at least one file was looked at. Memory: one file's text.
    """
    deadline = time.monotonic() + seconds
    found: list[int] = []
    looked = 0
    matches = index.matches_of(text)
    for first in range(start, len(order), _CHUNK):
        part = order[first : first + _CHUNK]
        whose = zip(part.tolist(), table["step"][part].tolist(), table["group"][part].tolist(), strict=True)
        for at, (place, step, group) in enumerate(whose, first):
            if len(found) == most:
                return Found(found, at, False)
            if step not in matches:
                if looked and time.monotonic() > deadline:
                    return Found(found, at, False)
                matches[step] = _groups_with(index.path_of(step), text)
                looked += 1
            if group in matches[step]:
                found.append(place)
    return Found(found, len(order), True)


def _groups_with(path: Path, text: str) -> frozenset[int]:
    """Numbers of the groups of a file that contain the text."""
    try:
        with pq.ParquetFile(path) as file:
            rows = file.read(columns=["group", "prompt", "completion"], use_threads=False)
    except (OSError, pa.ArrowException):  # the index names files that cannot be read
        return frozenset()
    hit = pc.or_kleene(
        pc.match_substring(rows["prompt"], text, ignore_case=True),
        pc.match_substring(rows["completion"], text, ignore_case=True),
    )
    return frozenset(rows["group"].filter(hit).to_pylist())


def prompts_of(index: GroupIndex, table: np.ndarray, places: Sequence[int], most: int = 240) -> list[dict[str, str]]:
    """The beginning of the prompt and of the first completion of each group."""
    texts: dict[int, pa.Table] = {}
    said = []
    for place in places:
        step, row = int(table["step"][place]), int(table["first_row"][place])
        if step not in texts:
            with pq.ParquetFile(index.path_of(step)) as file:
                texts[step] = file.read(columns=["prompt_uid", "prompt", "completion"])
        names = {"prompt_uid": "prompt_uid", "prompt": "prompt", "completion": "first"}
        values = {new: texts[step][old][row].as_py() or "" for old, new in names.items()}
        said.append({name: value[:most] for name, value in values.items()})
    return said
