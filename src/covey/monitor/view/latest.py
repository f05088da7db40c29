"""The content of a file that another process writes: one version of it, and another as soon as there is one."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from covey.runs.storage import NotPlainError, open_plain

T = TypeVar("T")
_LONGEST_REASON = 300


@dataclass(frozen=True)
class Version(Generic[T]):
    """Content of a file when it was last read."""

    mark: tuple[int, ...] | None = None
    """Inode, size and time of change; None where there is no such file, or none that can be opened."""
    content: T | None = None
    trouble: str | None = None
    """Reason why a file that is there has no content."""


class Latest(Generic[T]):
    """Value that `parse` makes of a plain file, kept while the file stays the same. Safe to use from several threads.

    Mark and content are of one open file. If it grows, is replaced or vanishes while it is read, the mark is at most too old, and the
    next call reads again. No content makes `read` raise, except an error that is no Exception.
    """

    def __init__(self, path: Path, parse: Callable[[BinaryIO], T], *, depth: int = 1) -> None:
        self.path, self._parse, self._depth = path, parse, depth
        self.last: Version[T] = Version()
        """The version of the last call."""
        self._lock = threading.Lock()

    def read(self) -> Version[T]:
        """The file as it is now."""
        with self._lock:
            try:
                with open(open_plain(self.path, depth=self._depth), "rb") as file:
                    facts = os.fstat(file.fileno())
                    mark = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
                    if mark != self.last.mark:
                        self.last = Version(mark, *self._parsed(file))
            except FileNotFoundError:
                self.last = Version()
            except OSError as error:
                self.last = Version(trouble=reason_of(error))
            return self.last

    def _parsed(self, file: BinaryIO) -> tuple[T | None, str | None]:
        try:
            return self._parse(file), None
        except Exception as error:
            if isinstance(error, OSError) and error.errno and not isinstance(error, NotPlainError):
                raise  # the disk's: tried again, though the file stays the same
            return None, reason_of(error)


def reason_of(error: Exception) -> str:
    """Why a file cannot be read, in a few words."""
    reason: Any = error.strerror if isinstance(error, OSError) and error.strerror else error
    return str(reason)[:_LONGEST_REASON]
