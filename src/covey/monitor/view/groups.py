"""Index of a run's groups of completions, a few numbers each, so that a million of them are filtered at once."""

import os
import re
import stat
import threading
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from covey.monitor.view.latest import reason_of
from covey.runs.step_files import path_of
from covey.runs.storage import kind_of, open_plain

_FILE = re.compile(r"step-(\d{6,15})\.parquet")
_MANY, _SECONDS = 1000, 2.0
"""A folder of more files than that is listed again after two seconds, not at every look."""
_MOST_FILES = 1_000_000

Mark: TypeAlias = tuple[int, int]
"""Size and time of change of a file: others mean that it was replaced."""


class FilesOnDisk:
    """The files `step-N.parquet` of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trouble: str | None = None
        """Error of reading the folder; None without one, or without a folder."""
        self._marks: dict[int, Mark] = {}
        self._looked = 0.0

    def marks(self) -> dict[int, Mark]:
        """By step, what each file is now."""
        if len(self._marks) <= _MANY or time.monotonic() - self._looked > _SECONDS:
            self.trouble, self._marks, self._looked = None, {}, time.monotonic()
            try:
                kind = self.folder.lstat().st_mode
                if not stat.S_ISDIR(kind):
                    raise NotADirectoryError(0, f"it is {kind_of(kind)}, and is not followed")
                self._marks = self._all()
            except FileNotFoundError:  # no rollouts yet
                return self._marks
            except OSError as error:
                self.trouble = f"{self.folder.name} cannot be read: {error.strerror}."
        return self._marks

    def _all(self) -> dict[int, Mark]:
        marks: dict[int, Mark] = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                match = _FILE.fullmatch(entry.name)
                if match and len(marks) < _MOST_FILES and (mark := _mark_of(entry)) is not None:
                    marks[int(match[1])] = mark
        return marks


def _mark_of(entry: os.DirEntry[str]) -> Mark | None:
    try:
        facts = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # a resume has just dropped it
        return None
    return facts.st_size, facts.st_mtime_ns


_SCALARS = ("group", "prompt_uid", "finish", "num_tokens", "reward", "advantage")
_CACHED_SEARCHES = 4
_BATCH = 50
"""Files whose numbers are worked out together."""
_MOST_ROWS = 200_000
_MOST_BYTES = 1 << 29
"""Rows, and bytes of the columns that are read, of one file; a larger one is not shown."""

NUMBERS = np.dtype(
    [
        ("step", "i8"), ("group", "i4"), ("first_row", "i4"), ("size", "i4"), ("uid", "u8"), ("reward", "f4"),
        ("lowest", "f4"), ("highest", "f4"), ("spread", "f4"), ("advantage", "f4"), ("length", "f4"),
        ("longest", "f4"), ("truncated", "i4"), ("change", "f4"),
    ]
)  # fmt: skip
"""One group: its place, then mean, lowest, highest and standard deviation of its rewards, its largest advantage by size,
mean and largest length, how many completions were cut off, and the gain of the mean reward since this prompt was last seen."""


Matches: TypeAlias = dict[tuple[int, Mark | None], frozenset[int]]
"""Numbers of the groups that contain a text, by step and version of its file."""


class GroupIndex:
    """The groups of `rollouts/`, newest files first; `refresh` reads the files that are new. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unreadable: dict[str, str] = {}
        """Files that could not be read, and why; they are tried again when they change."""
        self.trouble: str | None = None
        """Error of reading the folder; None without one, or without a folder."""
        self.pending = 0
        """Files that are not indexed yet."""
        self._files = FilesOnDisk(folder)
        self._reading = threading.Lock()
        self._lock = threading.Lock()
        self._seen: dict[int, Mark] = {}
        self._table = np.zeros(0, NUMBERS)
        self._new: list[np.ndarray] = []
        self._stale: set[int] = set()
        self._matches: dict[str, Matches] = {}

    def refresh(self, most_files: int | None = None) -> bool:
        """Read up to `most_files` files that are new or replaced (all by default). True if all are indexed now."""
        with self._reading:
            marks = self._files.marks()
            gone = self._seen.keys() - marks.keys()
            new = sorted((step for step, mark in marks.items() if self._seen.get(step) != mark), reverse=True)
            self.trouble = self._files.trouble
            self.pending = len(new)
            self._forget(gone)
            now = new[:most_files]
            for start in range(0, len(now), _BATCH):
                batch = now[start : start + _BATCH]
                rows = self._read(batch)
                with self._lock:
                    self._stale |= self._seen.keys() & set(batch)
                    self._seen |= {step: marks[step] for step in batch}
                    self._new.append(rows)
                self.pending -= len(batch)
            if not self.pending:
                self.table()  # before a reader asks for it
            return self.pending == 0

    def _forget(self, gone: Set[int]) -> None:
        if not gone:
            return
        with self._lock:
            self._new = [self._joined()]
            self._table = self._table[:0]
            self._new = [rows[~np.isin(rows["step"], list(gone))] for rows in self._new]
            for step in gone:
                del self._seen[step]
                self.unreadable.pop(self.path_of(step).name, None)

    def path_of(self, step: int) -> Path:
        """The file of a step."""
        return path_of(self.folder, step)

    def _read(self, steps: Sequence[int]) -> np.ndarray:
        """The groups of some files; those that cannot be read are named in `unreadable`."""
        tables = {step: table for step in steps if (table := self._columns(step)) is not None}
        try:
            return summary_of(tables)
        except Exception:  # noqa: BLE001 -- one of them is not like the others
            return np.concatenate([np.zeros(0, NUMBERS), *(self._alone(step, table) for step, table in tables.items())])

    def _alone(self, step: int, table: pa.Table) -> np.ndarray:
        try:
            return summary_of({step: table})
        except Exception as error:  # noqa: BLE001 -- a damaged file is skipped alone
            self.unreadable[self.path_of(step).name] = reason_of(error)
            return np.zeros(0, NUMBERS)

    def _columns(self, step: int) -> pa.Table | None:
        path = self.path_of(step)
        try:
            table = read_columns(path, _SCALARS)
            names = table.column_names
            missing = {"group", "prompt_uid", "finish", "num_tokens"} - set(names)
            if missing:
                raise KeyError(f"no column {', '.join(sorted(missing))}")
        except Exception as error:  # noqa: BLE001 -- Arrow's, and what a damaged schema makes of them
            self.unreadable[path.name] = reason_of(error)
            return None
        self.unreadable.pop(path.name, None)
        return table

    def refuse(self, step: int, mark: Mark | None, error: Exception) -> None:
        """Name a file that a reader could not read, while this version of it is the indexed one."""
        with self._lock:
            if mark is not None and self._seen.get(step) == mark:
                self.unreadable[self.path_of(step).name] = reason_of(error)

    def table(self) -> np.ndarray:
        """All indexed groups [n] as `NUMBERS`, by step and place."""
        with self._lock:
            return self._joined()

    def _joined(self) -> np.ndarray:
        if self._new:
            unchanged = self._table[~np.isin(self._table["step"], list(self._stale))] if self._stale else self._table
            joined = np.concatenate([unchanged, *self._new])
            if (np.diff(joined["step"]) < 0).any():
                joined = joined[np.argsort(joined["step"], kind="stable")]
            joined["change"] = _changes(joined)
            self._table, self._new, self._stale = joined, [], set()
        return self._table

    def matches_of(self, text: str) -> Matches:
        """Groups that contain the text, as far as a search has looked; kept for the last few texts."""
        with self._lock:
            matches = self._matches.pop(text, {})
            self._matches[text] = matches
            for oldest in list(self._matches)[:-_CACHED_SEARCHES]:
                del self._matches[oldest]
            return matches

    def mark_of(self, step: int) -> Mark | None:
        """Indexed version of a step's file; None where it is not indexed."""
        return self._seen.get(step)

    def reward_columns(self, step: int) -> list[str]:
        """The columns of single rewards in a step's file, in its order. OSError, ValueError or pa.ArrowException for no such file."""
        with open(open_plain(self.path_of(step), depth=2), "rb") as opened, pq.ParquetFile(opened) as file:
            return [name for name in file.schema_arrow.names if name.startswith("reward/")]

    def steps(self) -> list[int]:
        """Steps whose file is indexed, in order."""
        with self._lock:
            return sorted(self._seen)


def read_columns(path: Path, names: Sequence[str] | None = None) -> pa.Table:
    """Those of the columns that a Parquet file has (all by default), from a plain file of bounded size.

    OSError, ValueError or pa.ArrowException when it is no such file.
    """
    with open(open_plain(path, depth=2), "rb") as opened:
        return columns_of(opened, names)


def columns_of(opened: BinaryIO, names: Sequence[str] | None = None) -> pa.Table:
    """The same of an open file."""
    with pq.ParquetFile(opened) as file:
        there = [name for name in file.schema_arrow.names if names is None or name in names]
        about = file.metadata
        size = sum(
            group.column(at).total_uncompressed_size
            for group in map(about.row_group, range(about.num_row_groups))
            for at in range(group.num_columns)
            if group.column(at).path_in_schema.split(".")[0] in there or names is None
        )
        if about.num_rows > _MOST_ROWS or size > _MOST_BYTES:
            raise ValueError(f"it is larger than {_MOST_ROWS:,} rows or {_MOST_BYTES / 1e6:.0f} MB")
        return file.read(columns=there, use_threads=False)


def summary_of(tables: Mapping[int, pa.Table]) -> np.ndarray:
    """The groups [n] of the rows of some steps as `NUMBERS`; `change` is left at NaN. ValueError, KeyError for other rows."""
    tables = {step: table for step, table in tables.items() if table.num_rows}
    if not tables:
        return np.zeros(0, NUMBERS)
    counts = np.array([table.num_rows for table in tables.values()])
    step = np.repeat(np.array(list(tables), np.int64), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)  # [rows], where the rows of a step begin
    table = pa.concat_tables(tables.values(), promote_options="permissive")
    group = table["group"].to_numpy()
    starts = np.flatnonzero((np.diff(group, prepend=group[0] - 1) != 0) | (np.diff(step, prepend=step[0] - 1) != 0))
    sizes = np.diff(np.append(starts, len(group)))
    out = np.zeros(len(starts), NUMBERS)
    out["step"], out["group"], out["size"] = step[starts], group[starts], sizes
    out["first_row"] = starts - first[starts]
    uids = table["prompt_uid"].take(pa.array(starts)).to_pylist()
    out["uid"] = [xxhash.xxh64_intdigest((uid or "").encode()) for uid in uids]
    rewards = floats_of(table, "reward")
    scored = np.isfinite(rewards)
    scores = np.add.reduceat(scored, starts, dtype=np.int64)
    sums = np.add.reduceat(np.where(scored, rewards, 0.0), starts)
    means = np.divide(sums, scores, out=np.full(len(starts), np.nan), where=scores > 0)
    off = np.where(scored, rewards - np.repeat(means, sizes), 0.0)
    out["reward"] = means
    out["spread"] = np.sqrt(np.add.reduceat(off**2, starts) / np.maximum(scores, 1))
    out["lowest"] = np.fmin.reduceat(rewards, starts)
    out["highest"] = np.fmax.reduceat(rewards, starts)
    out["advantage"] = np.fmax.reduceat(np.abs(floats_of(table, "advantage")), starts)
    lengths = floats_of(table, "num_tokens")
    out["length"] = np.add.reduceat(lengths, starts) / sizes
    out["longest"] = np.fmax.reduceat(lengths, starts)
    out["truncated"] = np.add.reduceat(
        pc.equal(table["finish"], "length").fill_null(False).to_numpy().astype(np.int32), starts
    )
    out["change"] = np.nan
    return out


def floats_of(table: pa.Table, name: str) -> np.ndarray:
    """A column of numbers [rows]; NaN where it is empty, or not there."""
    if name not in table.column_names:
        return np.full(table.num_rows, np.nan)
    return np.asarray(table[name].cast(pa.float64()).to_numpy())


def _changes(table: np.ndarray) -> np.ndarray:
    """Mean reward of each group minus that of the same prompt when it was last seen [n]; NaN the first time."""
    change = np.full(len(table), np.nan, np.float32)
    order = np.argsort(table["uid"], kind="stable")
    uid, reward = table["uid"][order], table["reward"][order]
    same = np.flatnonzero(uid[1:] == uid[:-1]) + 1
    change[order[same]] = reward[same] - reward[same - 1]
    return change


SORTS: Mapping[str, tuple[str, bool]] = {
    "newest": ("step", True),
    "oldest": ("step", False),
    "highest reward": ("highest", True),
    "lowest reward": ("lowest", False),
    "best group": ("reward", True),
    "worst group": ("reward", False),
    "widest spread": ("spread", True),
    "largest advantage": ("advantage", True),
    "biggest gain": ("change", True),
    "biggest loss": ("change", False),
    "longest": ("longest", True),
    "shortest": ("length", False),
}
"""Sort orders of groups: the column, and True if the largest comes first."""


def select(table: np.ndarray, filters: Mapping[str, Any], sort: str) -> np.ndarray:
    """Places [k] in the table of the groups that pass all `filters`, ordered.

    `filters`: `from_step`, `to_step`, `min_reward` (a completion has that or more), `max_reward` (one has that or less), `truncated` (some was cut off),
    `signal` (rewards differ), `seen` (the prompt came up before), `uid` (a prompt's hash).
    """
    keep = np.ones(len(table), bool)
    if filters.get("from_step") is not None:
        keep &= table["step"] >= filters["from_step"]
    if filters.get("to_step") is not None:
        keep &= table["step"] <= filters["to_step"]
    if filters.get("min_reward") is not None:
        keep &= table["highest"] >= np.float32(filters["min_reward"])
    if filters.get("max_reward") is not None:
        keep &= table["lowest"] <= np.float32(filters["max_reward"])
    if filters.get("truncated"):
        keep &= table["truncated"] > 0
    if filters.get("signal"):
        keep &= table["highest"] > table["lowest"]
    if filters.get("uid") is not None:
        keep &= table["uid"] == np.uint64(filters["uid"])
    number, descending = SORTS[sort]
    if number != "step":
        keep &= ~np.isnan(table[number])
    places = np.flatnonzero(keep)
    return np.take(places, ordered(table[number][places], descending))


def ordered(values: np.ndarray, descending: bool) -> np.ndarray:
    """Places [n] in the order of values [n], equal ones as they stand."""
    keys = values.astype(np.float64)
    return np.argsort(-keys if descending else keys, kind="stable")
