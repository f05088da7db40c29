"""One process trains in a folder at a time; the system lets go of the lock when the process ends, however it ends. It refuses a folder with the files of others."""

import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from covey.errors import RunFolderError
from covey.runs.storage import ABSENT, NotPlainError, kind_of, open_plain

NAME = ".lock"


class FolderLock:
    """Held from `take` to `release`, or while entered. Another process that tries gets RunFolderError with this one's id.

    A POSIX record lock: children do not inherit it, so a worker that outlives its parent never keeps a folder locked, and
    the same process may take it again (a notebook cell that runs twice): the folder is free when each has released it. On
    disks without locks (some of networks) nothing is locked.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._file: tuple[int, int, int] | None = None

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *error: object) -> None:
        self.release()

    def take(self) -> None:
        if os.path.lexists(self.path) and (file := _identity(os.lstat(self.path))) in _LOCKED:
            self._file = file
            if not self.is_held():
                self._file = None
                raise self._in_use(_LOCKED[file][0])
            _LOCKED[file].append(_LOCKED[file][0])
            return
        try:
            descriptor = open_plain(self.path, os.O_RDWR | os.O_CREAT)
        except NotPlainError as error:
            raise RunFolderError(f"{self.path} cannot be used ({error.strerror}); remove it.") from error
        try:
            is_ours = _lock(descriptor)
        except OSError:  # a disk without locks
            os.close(descriptor)
            return
        if not is_ours:
            refusal = self._in_use(descriptor)
            os.close(descriptor)
            raise refusal
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} on {os.uname().nodename}".encode(), 0)
        self._file = _identity(os.fstat(descriptor))
        _LOCKED[self._file] = [descriptor]

    def _in_use(self, descriptor: int) -> RunFolderError:
        holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip() or "unknown"
        return RunFolderError(
            f"{self.path.parent} is in use: process {holder} trains in it now; choose another output_dir, or stop it."
        )

    def is_held(self) -> bool:
        """Lock the file once more: closing any descriptor of it, as a copy of the folder in this process does, has ended the lock.

        False where another process has locked it since.
        """
        with suppress(OSError):  # a disk that does not answer
            return self._file is None or _lock(_LOCKED[self._file][-1])
        return True

    def is_lost(self) -> bool:
        """True if the locked file was deleted, moved away or replaced; False where a disk does not answer."""
        try:
            return self._file is not None and _identity(os.lstat(self.path)) != self._file
        except OSError as error:
            return isinstance(error, ABSENT)

    def retake(self) -> Path | None:
        """Take the folder that has its path now. Returns the place to which the former one was moved, where the system tells it.

        RunFolderError where another process has it, and OSError where the disk refuses: the former file stays locked then.
        """
        former, place = self._file, None
        if former is not None:
            with suppress(OSError):  # Linux alone
                place = Path(os.readlink(f"/proc/self/fd/{_LOCKED[former][-1]}")).parent
            self._file = None
        try:
            self.take()
        except BaseException:
            self._file = former
            raise
        _let_go(former)
        return place if place is not None and place.is_dir() and place != self.path.parent.resolve() else None

    def release(self) -> None:
        _let_go(self._file)
        self._file = None


def _lock(descriptor: int) -> bool:
    """Take the POSIX lock of an open file, or keep it. False where another process has it; OSError on a disk without locks."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _let_go(file: tuple[int, int, int] | None) -> None:
    if file is None:
        return
    descriptor = _LOCKED[file].pop()
    if not _LOCKED[file]:
        del _LOCKED[file]
        os.close(descriptor)


_LOCKED: dict[tuple[int, int, int], list[int]] = {}
"""Descriptor of each file that this process has locked, once for each holder: closing any descriptor of a file ends its lock."""


def _identity(facts: os.stat_result) -> tuple[int, int, int]:
    return os.getpid(), facts.st_dev, facts.st_ino


_FOLDERS = frozenset({"rollouts", "evaluations", "bad_steps", "model"})
"""Folders that a run writes to; their contents count too."""
_FILES = re.compile(r"\.lock|.*\.(json|jsonl|yaml|safetensors|bin|jinja|model|txt)")
CHECKPOINT = re.compile(r"checkpoint-\d+(\..*)?")


def refuse_trespass(folder: Path) -> None:
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
        if path.name in _FOLDERS or path.name == "runs" or CHECKPOINT.fullmatch(path.name):
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
