"""One process trains in a folder at a time; the system lets go of the lock when the process ends, however it ends."""

from __future__ import annotations

import os
from pathlib import Path

from covey.errors import RunFolderError
from covey.runs.storage import NotPlainError, open_plain

NAME = ".lock"


class FolderLock:
    """Held from `take` to `release`. Another process that tries gets RunFolderError with this one's id.

    A POSIX record lock: children do not inherit it, so a worker that outlives its parent never keeps a folder locked, and
    the same process may take it again (a notebook cell that runs twice). Where there is none (Windows, some network
    disks) nothing is locked.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._descriptor: int | None = None

    def take(self) -> None:
        try:
            import fcntl
        except ImportError:
            return
        try:
            descriptor = open_plain(self.path, os.O_RDWR | os.O_CREAT)
        except NotPlainError as error:
            raise RunFolderError(f"{self.path} cannot be used ({error.strerror}); remove it.") from error
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = os.read(descriptor, 100).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise RunFolderError(
                f"{self.path.parent} is in use: process {holder} trains in it now; choose another output_dir, or stop it."
            ) from error
        except OSError:  # a disk without locks
            os.close(descriptor)
            return
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} on {os.uname().nodename}".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
