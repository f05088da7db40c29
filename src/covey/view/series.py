"""The numbers of `metrics.jsonl` as columns: read once, then only what has been added."""

from __future__ import annotations

import io
import json
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

_BLOCK = 4 << 20
_TAIL = 64
_LONGEST_LINE = 64 << 20
"""Bytes; what is longer is no line of metrics, and is passed over in parts."""
NOT_FINITE = np.inf
"""What stands in a column for NaN and infinite values; NaN stands for a step that has no such metric."""


class SeriesIndex:
    """All metrics of one run, in memory as one float column each; `refresh` reads what the file has gained.

    A file that was replaced (a resume drops later steps) is read again from its start. Safe to use from several threads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size if path.is_file() else 0
        """Bytes of the file's whole lines when last looked at, as far as that is known."""
        self.done = 0
        """Bytes of it that are indexed."""
        self._reading = threading.Lock()
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._columns: dict[str, np.ndarray] = {}
        self._rows = 0
        self._room = 0
        self._inode = -1
        self._before = b""
        self.done = 0

    def refresh(self, most_bytes: int | None = None) -> bool:
        """Read up to `most_bytes` more (all of it by default). Whether the whole file is indexed now.

        Readers wait only while rows are added, not while lines are parsed.
        """
        with self._reading:
            try:
                descriptor = os.open(self.path, os.O_RDONLY)
            except FileNotFoundError:
                with self._lock:
                    self._clear()
                    self.size = 0
                return True
            with open(descriptor, "rb") as file:
                return self._read_more(file, most_bytes)

    def _read_more(self, file: Any, most_bytes: int | None) -> bool:
        found = os.fstat(file.fileno())
        self.size = found.st_size
        if found.st_ino != self._inode or found.st_size < self.done or self._was_rewritten(file):
            with self._lock:
                self._clear()
                self._inode = found.st_ino
        goal = self.size if most_bytes is None else min(self.size, self.done + most_bytes)
        while self.done < goal:
            file.seek(self.done)
            block = file.read(_BLOCK)
            block = block[: block.rfind(b"\n") + 1] or block + file.readline(_LONGEST_LINE)
            if not block.endswith(b"\n") and len(block) < _LONGEST_LINE:
                self.size = self.done  # a line that is still being written, or that a kill tore, is not counted
                return True
            columns = _columns_of(block)
            with self._lock:
                self._add(columns)
                self.done += len(block)
                self._before = block[-_TAIL:]
        return self.done >= self.size

    def _was_rewritten(self, file: Any) -> bool:
        file.seek(self.done - len(self._before))
        return bool(file.read(len(self._before)) != self._before)

    def _add(self, columns: dict[str, np.ndarray]) -> None:
        gained = len(columns["step"])
        rows = self._rows + gained
        if rows > self._room:
            self._room = max(rows, 2 * self._room, 1024)
            for name, old in self._columns.items():
                self._columns[name] = _grown(old[: self._rows], self._room)
        for name, values in columns.items():
            if name not in self._columns:
                self._columns[name] = np.full(self._room, np.nan)
            self._columns[name][self._rows : rows] = values
        self._rows = rows

    def names(self) -> list[str]:
        """The metrics there are, sorted; `step` and `time` are none."""
        with self._lock:
            return sorted(name for name in self._columns if name not in ("step", "time"))

    def last_step(self) -> int:
        """The last indexed step; 0 when there is none."""
        with self._lock:
            return int(self._columns["step"][self._rows - 1]) if self._rows else 0

    def last(self, name: str) -> float | None:
        """The newest finite value of a metric."""
        values = self.column(name)[1]
        finite = np.flatnonzero(np.isfinite(values))
        return float(values[finite[-1]]) if len(finite) else None

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps [n] in order and values [n] of the steps that have this metric; values that are not finite are `inf`."""
        with self._lock:
            if name not in self._columns:
                return np.zeros(0), np.zeros(0)
            steps = self._columns["step"][: self._rows]
            values = self._columns[name][: self._rows]
        has_it = ~np.isnan(values)  # rows once written never change, so this needs no lock
        steps, values = steps[has_it], values[has_it]
        if len(steps) > 1 and (np.diff(steps) < 0).any():
            order = np.argsort(steps, kind="stable")
            steps, values = steps[order], values[order]
        return steps, values


def _grown(column: np.ndarray, room: int) -> np.ndarray:
    new = np.full(room, np.nan)
    new[: len(column)] = column
    return new


def _columns_of(block: bytes) -> dict[str, np.ndarray]:
    """The numeric columns of whole lines; `step` is always there."""
    if block.lstrip().startswith(b"{"):  # pyarrow 26 ends the process on lines that are all `null`
        with suppress(ValueError):  # a damaged line, a name that is no text, a metric that is now text and now a number
            found = _columns_by_arrow(block)
            if found is not None:
                return found
    return _columns_line_by_line(block)


def _columns_by_arrow(block: bytes) -> dict[str, np.ndarray] | None:
    """The same, fast; None for lines that need a closer look. ValueError for lines that Arrow does not read."""
    table = pj.read_json(io.BytesIO(block), read_options=pj.ReadOptions(block_size=len(block) + 1))
    names = table.column_names
    if names.count("step") != 1 or not pa.types.is_integer(table["step"].type) or table["step"].null_count:
        return None
    columns = {}
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            return None
        kind = table.schema.field(name).type
        if pa.types.is_integer(kind) or pa.types.is_floating(kind):
            columns[name] = np.array(table[name].cast(pa.float64(), safe=False).to_numpy())
    if "non_finite" in table.column_names:
        _mark_not_finite(columns, table["non_finite"].combine_chunks(), table.num_rows)
    return columns


def _mark_not_finite(columns: dict[str, np.ndarray], named: Any, rows: int) -> None:
    if not pa.types.is_struct(named.type):
        return
    for name, words in zip((field.name for field in named.type), named.flatten(), strict=True):
        if "." not in name or name in columns or "/" in name:
            marked = np.asarray(words.is_valid())
            columns.setdefault(name, np.full(rows, np.nan))[marked] = NOT_FINITE


def _columns_line_by_line(block: bytes) -> dict[str, np.ndarray]:
    rows = [row for row in map(_row_of, block.splitlines()) if row is not None]
    names = {name for row in rows for name in row} | {"step"}
    return {name: np.array([row.get(name, np.nan) for row in rows], dtype=np.float64) for name in names}


def _number(value: int | float) -> float:
    """As a float; a whole number too large for one is not finite."""
    return float(value) if abs(value) < 2**1023 else NOT_FINITE


def _row_of(line: bytes) -> dict[str, float] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or abs(row["step"]) > 2**53:
        return None
    named = row.pop("non_finite", None)
    found = {name: _number(value) for name, value in row.items() if type(value) in (int, float)}
    for name in named if isinstance(named, dict) else ():
        if name in row:
            found[name] = NOT_FINITE
    return found
