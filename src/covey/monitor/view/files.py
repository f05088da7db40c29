"""Listing of a run's rollout files, without a stat of each of ten thousand every second."""

import os
import re
import stat
import time
from pathlib import Path
from typing import TypeAlias

from covey.runs.step_files import path_of
from covey.runs.storage import kind_of

_FILE = re.compile(r"step-(\d{6,15})\.parquet")
_ALL_SECONDS = 30.0
_GRAIN_SECONDS = 2.0
"""A folder that changed this recently may have changed again within one tick of its clock."""
_LAST = 20
_MOST_FILES = 1_000_000

Mark: TypeAlias = tuple[int, int]
"""Size and time of change of a file: others mean that it was replaced."""


class FilesOnDisk:
    """The files `step-N.parquet` of a folder.

    A file that is renamed into place or removed, as Covey does, changes the time of its folder; only then all are looked at. One that
    grows in place (a copy under way) does not, so the latest few are looked at each time, and every half minute all.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trouble: str | None = None
        """Error of reading the folder; None without one, or without a folder."""
        self._marks: dict[int, Mark] = {}
        self._folder_time = -1
        self._looked = 0.0

    def marks(self) -> dict[int, Mark]:
        """By step, what each file is now."""
        self.trouble = None
        try:
            facts = self.folder.lstat()
            if not stat.S_ISDIR(facts.st_mode):
                raise NotADirectoryError(0, f"it is {kind_of(facts.st_mode)}, and is not followed")
            return self._marks_at(facts.st_mtime_ns)
        except FileNotFoundError:
            self._marks = {}
        except OSError as error:
            self.trouble = f"{self.folder.name} cannot be read: {error.strerror}."
            self._marks = {}
        return self._marks

    def _marks_at(self, changed: int) -> dict[int, Mark]:
        now = time.time()
        is_settled = changed == self._folder_time and now - changed / 1e9 > _GRAIN_SECONDS
        if is_settled and 0 <= now - self._looked < _ALL_SECONDS:
            self._look_again()
        else:
            self._marks = self._all()
            self._folder_time, self._looked = changed, now
        return self._marks

    def _all(self) -> dict[int, Mark]:
        marks: dict[int, Mark] = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                match = _FILE.fullmatch(entry.name)
                if match and len(marks) < _MOST_FILES and (mark := _mark_of(entry)) is not None:
                    marks[int(match[1])] = mark
        return marks

    def _look_again(self) -> None:
        for step in sorted(self._marks, key=lambda step: self._marks[step][1])[-_LAST:]:
            mark = _mark_of(path_of(self.folder, step))
            if mark is None:
                del self._marks[step]
            else:
                self._marks[step] = mark


def _mark_of(path: Path | os.DirEntry[str]) -> Mark | None:
    try:
        facts = path.stat(follow_symlinks=False)
    except FileNotFoundError:  # a resume has just dropped it
        return None
    return facts.st_size, facts.st_mtime_ns
