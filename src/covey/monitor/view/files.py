"""Listing of a run's rollout files."""

import os
import re
import stat
import time
from pathlib import Path
from typing import TypeAlias

from covey.runs.storage import kind_of

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
