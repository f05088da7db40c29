"""Full-text search of groups: a bounded amount of work a request, with the place to continue from."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from covey.monitor.view.groups import GroupIndex, Mark, Matches, read_columns

_CHUNK = 4096
_NAMES = {"prompt_uid": "prompt_uid", "prompt": "prompt", "completion": "first"}


@dataclass(frozen=True)
class SearchHits:
    """Matches of one part of a search."""

    places: list[int]
    """Groups that match, as places in the table, in the order that was asked for."""
    at: int
    """Number of groups searched so far, in the order; the next part starts here."""


def search(
    index: GroupIndex,
    table: np.ndarray,
    order: np.ndarray,
    text: str,
    *,
    start: int = 0,
    most: int = 50,
    seconds: float = 0.06,
) -> SearchHits:
    """Look through `order` [k] (places in `table`) from `start` for `text` in prompts and completions, case ignored.

    Ends once `most` groups are found, or `seconds` have passed and at least one file was looked at. Memory: one file's text.
    """
    deadline = time.monotonic() + seconds
    places: list[int] = []
    looked = 0
    matches = index.matches_of(text)
    for first in range(start, len(order), _CHUNK):
        part = order[first : first + _CHUNK]
        marks = {step: index.mark_of(step) for step in np.unique(table["step"][part]).tolist()}
        for at in _worth_a_look(table["step"][part], marks, matches):
            place = int(part[at])
            step, group = int(table["step"][place]), int(table["group"][place])
            version = (step, marks[step])
            if len(places) == most:
                return SearchHits(places, first + at)
            if version not in matches:
                if looked and time.monotonic() > deadline:
                    return SearchHits(places, first + at)
                matches[version] = _groups_with(index.path_of(step), text)
                looked += 1
            if group in matches[version]:
                places.append(place)
    return SearchHits(places, len(order))


def _worth_a_look(steps: np.ndarray, marks: Mapping[int, Mark | None], matches: Matches) -> list[int]:
    """Positions in `steps` [k] of those whose file was not searched yet, or has the text somewhere."""
    worth = [step for step, mark in marks.items() if matches.get((step, mark), True)]
    return np.flatnonzero(np.isin(steps, worth)).tolist() if worth else []


def _groups_with(path: Path, text: str) -> frozenset[int]:
    """Numbers of the groups of a file that contain the text."""
    try:
        rows = read_columns(path, ["group", "prompt", "completion"])
        hit = pc.or_kleene(
            pc.match_substring(rows["prompt"], text, ignore_case=True),
            pc.match_substring(rows["completion"], text, ignore_case=True),
        )
        return frozenset(rows["group"].filter(hit).to_pylist())
    except (OSError, ValueError, KeyError, pa.ArrowException):  # a file without these texts is one without the words
        return frozenset()


def prompts_of(
    index: GroupIndex, table: np.ndarray, places: Sequence[int], most: int = 240, names: Mapping[str, str] = _NAMES
) -> list[dict[str, str]]:
    """The beginning of the prompt and of the first completion of each group; empty where the file has none.

    `names` gives columns of the file their names in the answer; no others are read.
    """
    texts: dict[int, pa.Table | None] = {}
    beginnings = []
    for place in places:
        step, row = int(table["step"][place]), int(table["first_row"][place])
        if step not in texts:
            texts[step] = _texts(index.path_of(step), names)
        beginnings.append({new: _beginning(texts[step], old, row, most) for old, new in names.items()})
    return beginnings


def _texts(path: Path, names: Mapping[str, str]) -> pa.Table | None:
    try:
        return read_columns(path, list(names))
    except (OSError, ValueError, pa.ArrowException):  # dropped by a resume, or damaged since it was indexed
        return None


def _beginning(table: pa.Table | None, name: str, row: int, most: int) -> str:
    if table is None or name not in table.column_names or row >= table.num_rows:
        return ""
    value = table[name][row].as_py()
    return "" if value is None else str(value)[:most]
