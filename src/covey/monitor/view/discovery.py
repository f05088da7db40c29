"""The runs below the folders that the user named."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

_MARKS = ("run.json", "metrics.jsonl", "rollouts")
_DEPTH = 2


def find_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """Every run in or below the folders (two levels deep), by a short name that no two of them share.

    A folder is a run when it holds `run.json`, `metrics.jsonl` or `rollouts/`; a run's own folders are not looked into.
    """
    paths = {path.resolve(): None for folder in folders for path in _below(folder.resolve(), _DEPTH)}
    return _name(list(paths))


def _below(folder: Path, depth: int) -> list[Path]:
    try:
        if any(os.path.lexists(folder / mark) for mark in _MARKS):
            return [folder]
        if depth == 0:
            return []
        inner = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.is_dir())
    except OSError:  # a folder that may not be looked into, or is gone
        return []
    return [run for path in inner for run in _below(path, depth - 1)]


def _name(paths: Sequence[Path]) -> dict[str, Path]:
    """Names of runs: the shortest suffixes of their paths that are unique."""
    named: dict[str, Path] = {}
    left, parts = list(paths), 1
    while left:
        counts = Counter(_tail(path, parts) for path in paths)
        is_longest = parts > max(len(path.parts) for path in left)
        named |= {_tail(path, parts): path for path in left if is_longest or counts[_tail(path, parts)] == 1}
        left = [path for path in left if not is_longest and counts[_tail(path, parts)] > 1]
        parts += 1
    return named


def _tail(path: Path, parts: int) -> str:
    name = "/".join(path.parts[-parts:])
    return os.fsencode(name).decode("utf-8", "backslashreplace")  # a browser knows no other
