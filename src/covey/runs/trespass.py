"""Check for links and special files in a run's folder, through which a write would leave it. Refused before a run begins."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from covey.errors import RunFolderError
from covey.runs.storage import kind_of

_FOLDERS = frozenset({"rollouts", "evaluations", "bad_steps", "model"})
"""Folders that a run writes to; their contents count too."""
_FILES = re.compile(r"\.lock|.*\.(json|jsonl|yaml|safetensors|bin|jinja|model|txt)")
_CHECKPOINT = re.compile(r"checkpoint-\d+(\..*)?")


def refuse(folder: Path) -> None:
    """Raise RunFolderError, naming the first, where the folder holds a link or no file in place of what a run writes.

    The folder may itself be reached through a link, and foreign names (`latest -> checkpoint-10`) are ignored.
    """
    for path, kind, expected in _kinds_of(folder):
        if kind != expected:
            raise RunFolderError(
                f"{path} is {kind}, and a run writes {expected} there, never outside its folder; remove it, "
                "or choose another output_dir."
            )


def _kinds_of(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """(path, kind found, kind expected) of every path that a run may write to."""
    for path, kind in _entries(folder):
        if path.name in _FOLDERS or path.name == "runs" or _CHECKPOINT.fullmatch(path.name):
            yield path, kind, "a folder"
            if path.name in _FOLDERS and kind == "a folder":
                yield from _links_below(path)
        elif _FILES.fullmatch(path.name):
            yield path, kind, "a file"


def _links_below(folder: Path) -> Iterator[tuple[Path, str, str]]:
    for path, kind in _entries(folder):
        yield path, kind, "a folder" if kind == "a folder" else "a file"
        if kind == "a folder":
            yield from _links_below(path)


def _entries(folder: Path) -> list[tuple[Path, str]]:
    """Entries of a folder with the kind of each; empty if there is no folder."""
    if not os.path.isdir(folder):
        return []
    kinds = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another process has just renamed it
                    kinds.append((Path(entry.path), _kind(entry.stat(follow_symlinks=False))))
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be read ({error.strerror}); choose another output_dir.") from error
    return kinds


def _kind(facts: os.stat_result) -> str:
    is_second = stat.S_ISREG(facts.st_mode) and facts.st_nlink > 1
    return "a file with a second name (a hard link)" if is_second else kind_of(facts.st_mode)
