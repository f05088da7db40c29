"""What is known of every group of completions of a run, in a few numbers each, so that a million of them filter at once."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_FILE = re.compile(r"step-(\d+)\.parquet")
_SCALARS = ("group", "prompt_uid", "finish", "num_tokens", "reward", "advantage")
_KEPT_SEARCHES = 4

NUMBERS = np.dtype(
    [
        ("step", "i8"),
        ("group", "i4"),
        ("first_row", "i4"),
        ("size", "i4"),
        ("uid", "u8"),
        ("reward", "f4"),
        ("lowest", "f4"),
        ("highest", "f4"),
        ("spread", "f4"),
        ("advantage", "f4"),
        ("length", "f4"),
        ("longest", "f4"),
        ("truncated", "i4"),
        ("change", "f4"),
    ]
)
"""One group: its place, then mean, lowest, highest and standard deviation of its rewards, its largest advantage by size,
mean and largest length, how many completions were cut off, and the gain of the mean reward since this prompt was last seen."""


class GroupIndex:
    """The groups of `rollouts/`, newest files first; `refresh` reads the files that are new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unreadable: dict[str, str] = {}
        """Files that could not be read, and why."""
        self.pending = 0
        """Files that are not indexed yet."""
        self._lock = threading.Lock()
        self._parts: dict[int, np.ndarray] = {}
        self._seen: dict[int, tuple[int, int]] = {}
        self._joined: np.ndarray | None = None
        self._matches: dict[str, dict[int, frozenset[int]]] = {}

    def refresh(self, most_files: int | None = None) -> bool:
        """Read up to `most_files` files that are new or replaced (all by default). Whether all are indexed now."""
        found = self._on_disk()
        with self._lock:
            for step in [step for step in self._parts if step not in found]:
                del self._parts[step], self._seen[step]
                self._joined = None
            new = sorted((step for step, mark in found.items() if self._seen.get(step) != mark), reverse=True)
        for step in new[:most_files]:
            part = self._read(step)
            with self._lock:
                self._parts[step], self._seen[step] = part, found[step]
                self._joined = None
                for by_step in self._matches.values():
                    by_step.pop(step, None)
        self.pending = max(0, len(new) - (len(new) if most_files is None else most_files))
        return self.pending == 0

    def _on_disk(self) -> dict[int, tuple[int, int]]:
        found = {}
        for path in self.folder.glob("step-*.parquet") if self.folder.is_dir() else ():
            match = _FILE.fullmatch(path.name)
            try:
                facts = path.stat()
            except FileNotFoundError:  # a resume has just dropped it
                continue
            if match:
                found[int(match[1])] = (facts.st_size, facts.st_mtime_ns)
        return found

    def path_of(self, step: int) -> Path:
        """The file of a step."""
        return self.folder / f"step-{step:06d}.parquet"

    def _read(self, step: int) -> np.ndarray:
        path = self.path_of(step)
        try:
            with pq.ParquetFile(path) as file:
                table = file.read(columns=[name for name in _SCALARS if name in file.schema_arrow.names])
            self.unreadable.pop(path.name, None)
            return summary_of(step, table)
        except (OSError, pa.ArrowException, KeyError) as error:
            self.unreadable[path.name] = str(error)
            return np.zeros(0, NUMBERS)

    def table(self) -> np.ndarray:
        """All indexed groups [n] as `NUMBERS`, by step and place."""
        with self._lock:
            if self._joined is None:
                parts = [self._parts[step] for step in sorted(self._parts)]
                joined = np.concatenate(parts) if parts else np.zeros(0, NUMBERS)
                joined["change"] = _changes(joined)
                self._joined = joined
            return self._joined

    def matches_of(self, text: str) -> dict[int, frozenset[int]]:
        """By step, the groups that contain the text, as far as a search has looked; kept for the last few texts."""
        with self._lock:
            known = self._matches.pop(text, {})
            self._matches[text] = known
            for oldest in list(self._matches)[:-_KEPT_SEARCHES]:
                del self._matches[oldest]
            return known

    def steps(self) -> list[int]:
        """Steps whose file is indexed, in order."""
        with self._lock:
            return sorted(self._parts)


def summary_of(step: int, table: pa.Table) -> np.ndarray:
    """The groups [n] of one step's rows as `NUMBERS`; `change` is left at NaN."""
    if not table.num_rows:
        return np.zeros(0, NUMBERS)
    group = table["group"].to_numpy()
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    sizes = np.diff(np.append(starts, len(group)))
    out = np.zeros(len(starts), NUMBERS)
    out["step"], out["group"], out["first_row"], out["size"] = step, group[starts], starts, sizes
    out["uid"] = _hashes(table["prompt_uid"].take(pa.array(starts)))
    rewards = _floats(table, "reward")
    scored = np.isfinite(rewards)
    counts = np.add.reduceat(scored, starts, dtype=np.int64)
    sums = np.add.reduceat(np.where(scored, rewards, 0.0), starts)
    means = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    off = np.where(scored, rewards - np.repeat(means, sizes), 0.0)
    out["reward"] = means
    out["spread"] = np.sqrt(np.add.reduceat(off**2, starts) / np.maximum(counts, 1))
    out["lowest"] = np.fmin.reduceat(rewards, starts)
    out["highest"] = np.fmax.reduceat(rewards, starts)
    out["advantage"] = np.fmax.reduceat(np.abs(_floats(table, "advantage")), starts)
    lengths = _floats(table, "num_tokens")
    out["length"] = np.add.reduceat(lengths, starts) / sizes
    out["longest"] = np.fmax.reduceat(lengths, starts)
    out["truncated"] = np.add.reduceat(pc.equal(table["finish"], "length").to_numpy().astype(np.int32), starts)
    out["change"] = np.nan
    return out


def _floats(table: pa.Table, name: str) -> np.ndarray:
    if name not in table.column_names:
        return np.full(table.num_rows, np.nan)
    return np.asarray(table[name].cast(pa.float64()).to_numpy())


def _hashes(texts: pa.ChunkedArray) -> np.ndarray:
    import xxhash

    return np.array([xxhash.xxh64_intdigest((text or "").encode()) for text in texts.to_pylist()], dtype=np.uint64)


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
"""What groups can be ordered by: the number, and whether the largest comes first."""


def select(table: np.ndarray, filters: Mapping[str, Any], sort: str) -> np.ndarray:
    """Places [k] in the table of the groups that pass all `filters`, ordered.

    `filters`: `from_step`, `to_step`, `min_reward`, `max_reward` (some completion lies between), `truncated` (some was cut off),
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
        keep &= table["spread"] > 0
    if filters.get("uid") is not None:
        keep &= table["uid"] == np.uint64(filters["uid"])
    number, descending = SORTS[sort]
    values = table[number].astype(np.float64)
    if number != "step":
        keep &= ~np.isnan(values)
    places = np.flatnonzero(keep)
    keys = -values[places] if descending else values[places]
    return places[np.argsort(keys, kind="stable")]
