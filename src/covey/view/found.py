"""The runs below the folders that the user named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_MARKS = ("run.json", "metrics.jsonl", "rollouts")
_DEPTH = 2


def find_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """Every run in or below the folders (two levels deep), by a short name that no two of them share.

    A folder is a run when it holds `run.json`, `metrics.jsonl` or `rollouts/`; a run's own folders are not looked into.
    """
    paths: list[Path] = []
    for folder in folders:
        paths += [path for path in _below(folder.resolve(), _DEPTH) if path not in paths]
    return _named(paths)


def _below(folder: Path, depth: int) -> list[Path]:
    if any((folder / mark).exists() for mark in _MARKS):
        return [folder]
    if depth == 0 or not folder.is_dir():
        return []
    inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [run for path in inner for run in _below(path, depth - 1)]


def _named(paths: Sequence[Path]) -> dict[str, Path]:
    """By as many last parts of the path as it takes to tell them apart."""
    named: dict[str, Path] = {}
    for path in paths:
        parts = 1
        while sum(_tail(other, parts) == _tail(path, parts) for other in paths) > 1:
            parts += 1
        named[_tail(path, parts)] = path
    return named


def _tail(path: Path, parts: int) -> str:
    return "/".join(path.parts[-parts:])
