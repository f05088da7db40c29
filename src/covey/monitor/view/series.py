"""The numbers of `metrics.jsonl` as columns, read incrementally."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from covey.runs.metrics import NON_FINITE
from covey.runs.storage import open_plain

_BLOCK = 4 << 20
_TAIL = 64
_LONGEST_LINE = 4 << 20
"""Bytes; a longer line holds no metrics, and is skipped in parts."""
_NO_METRICS = ("step", "time", "clock_offset")
_MOST_METRICS = 2000
_MOST_NUMBERS = 1 << 25
"""Most numbers of all metrics and steps together: a quarter of a gigabyte, 500,000 steps of 66 metrics."""
_MOST_AT_ONCE = 1 << 24
"""Numbers of one block, those that are not there counted."""
NOT_FINITE = np.inf
"""Placeholder in a column for NaN and infinite values; NaN marks a step without this metric."""


class SeriesIndex:
    """All metrics of one run, in memory as one float column each; `refresh` reads the lines appended since.

    A file that was replaced (a resume drops later steps) is read again from its start. Safe to use from several threads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        """Bytes of the file's whole lines at the last read, as far as known."""
        self.done = 0
        """Bytes of it that are indexed."""
        self.trouble: str | None = None
        """Reason why rows are missing; None when all are read."""
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
        """Read up to `most_bytes` more (all of it by default). True if the whole file is indexed now.

        Readers wait only while rows are added, not while lines are parsed.
        """
        with self._reading:
            try:
                descriptor = open_plain(self.path)
            except OSError as error:
                with self._lock:
                    self._clear()
                    self.size = 0
                is_there = not isinstance(error, FileNotFoundError)
                self.trouble = f"{self.path.name} cannot be read: {error.strerror}." if is_there else None
                return True
            with open(descriptor, "rb") as file:
                return self._read_more(file, most_bytes)

    def _read_more(self, file: Any, most_bytes: int | None) -> bool:
        stat = os.fstat(file.fileno())
        self.size = stat.st_size
        if stat.st_ino != self._inode or stat.st_size < self.done or self._was_rewritten(file):
            with self._lock:
                self._clear()
                self._inode = stat.st_ino
                self.trouble = None
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
                if not self._add(columns):
                    self.size = self.done
                    return True
                self.done += len(block)
                self._before = block[-_TAIL:]
        return self.done >= self.size

    def _was_rewritten(self, file: Any) -> bool:
        file.seek(self.done - len(self._before))
        return bool(file.read(len(self._before)) != self._before)

    def _add(self, columns: dict[str, np.ndarray]) -> bool:
        """True if the memory limit allowed these rows."""
        gained = len(columns["step"])
        rows = self._rows + gained
        self._leave_out(columns, rows)
        if rows * len(self._columns) > _MOST_NUMBERS:
            self.trouble = f"{self.path.name} holds more than can be shown; steps after {self._last()} are left out."
            return False
        if rows > self._room:
            self._room = max(rows, 2 * self._room, 1024)
            more = (0, self._room - self._rows)
            for name, old in self._columns.items():
                self._columns[name] = np.pad(old[: self._rows], more, constant_values=np.nan)
        for name, values in columns.items():
            if name not in self._columns:
                self._columns[name] = np.full(self._room, np.nan)
            self._columns[name][self._rows : rows] = values
        self._rows = rows
        return True

    def _leave_out(self, columns: dict[str, np.ndarray], rows: int) -> None:
        """Drop new metrics beyond the limit."""
        room = min(_MOST_METRICS, _MOST_NUMBERS // (2 * max(rows, 1024)))
        new = [name for name in columns if name not in (*self._columns, *_NO_METRICS)]
        for name in new[max(0, room - len(self._columns)) :]:
            del columns[name]
            self.trouble = f"{self.path.name} names more than {room} metrics; the others are left out."

    def _last(self) -> int:
        return int(self._columns["step"][self._rows - 1]) if self._rows else 0

    def names(self) -> list[str]:
        """The metrics there are, sorted; the step and its times are none."""
        with self._lock:
            return sorted(name for name in self._columns if name not in _NO_METRICS)

    def last_step(self) -> int:
        """The last indexed step; 0 when there is none."""
        with self._lock:
            return self._last()

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


def _columns_of(block: bytes) -> dict[str, np.ndarray]:
    """The numeric columns of whole lines; `step` is always there. Of more metrics than one run may have, the first ones."""
    rows = [row for row in map(_row_of, block.splitlines()) if row is not None]
    names: dict[str, Any] = {"step": None}
    for row in rows:
        names |= row
    most = list(names)[: min(_MOST_METRICS + 3, _MOST_AT_ONCE // max(1, len(rows)))]
    columns = {name: _numbers([row.get(name) for row in rows]) for name in most}
    return {name: values for name, values in columns.items() if name == "step" or not np.isnan(values).all()}


def _numbers(values: list[Any]) -> np.ndarray:
    """Of one metric; NaN for what is no number, `inf` for a whole number too large for a float."""
    if not set(map(type, values)) <= {float, type(None)}:
        numbers = [value if type(value) in (int, float) else None for value in values]
        values = [NOT_FINITE if value is not None and abs(value) >= 2**1023 else value for value in numbers]
    return np.array(values, dtype=np.float64)


def _row_of(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or abs(row["step"]) > 2**53:
        return None
    named = row.pop(NON_FINITE, None)
    for name in named if isinstance(named, dict) else ():
        if name in row:
            row[name] = NOT_FINITE
    return row
