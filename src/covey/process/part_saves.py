"""Sharded tensors written to disk while training goes on: serialized in memory together, then each process writes its files alone.

No collective runs after the start, so that the disk's work can be done on a thread while the main one trains. The processes tell
each other through the heartbeat's store.
"""

import io
import json
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter

from covey.errors import RankError, StorageError
from covey.process.shard_files import FOLDER
from covey.process.world import World

logger = logging.getLogger(__name__)


class PartSave:
    """One save of sharded tensors. The main process calls `lead`, every other one `follow`, each on any thread."""

    def __init__(self, tensors: Mapping[str, Tensor], world: World) -> None:
        """Copy this process's shards to host memory. Collective."""
        self.world = world
        self.key = world.broadcast(uuid.uuid4().hex)
        self.files = _serialize(tensors) if tensors else {}
        self.is_announced = False

    def lead(self, folder: Path) -> None:
        """Write this process's files into `folder`, which all processes must see, and wait until the others have written theirs.

        Raises the OSError of a process whose disk refused, and StorageError if a process ended before.
        """
        if not self.files:
            return
        (folder / FOLDER).mkdir()
        self._announce(str(folder / FOLDER))
        refused = self._written(folder / FOLDER)
        for rank in range(1, self.world.size):  # all of them: none may be writing when the folder is removed
            try:
                reply = self.world.await_post(f"{self.key}/{rank}", rank)
            except RankError as error:
                raise StorageError(f"{folder.name.partition('.')[0]} is not whole: {error}") from error
            refused = refused or (OSError(*json.loads(reply)) if reply else None)
        if refused is not None:
            raise refused

    def cancel(self) -> None:
        """Tell the others that there will be no folder, if none was named."""
        if not self.is_announced:
            self._announce("")

    def follow(self) -> None:
        """Write this process's files into the folder that the main process names."""
        try:
            folder = self.world.await_post(f"{self.key}/folder", 0)
            refused = self._written(Path(folder)) if folder else None
            if refused is not None:
                logger.error("This process's part of the checkpoint could not be written: %s", refused)
            self.world.post(
                f"{self.key}/{self.world.rank}", json.dumps([refused.errno, str(refused)]) if refused else ""
            )
        except RankError as error:
            logger.warning("A checkpoint is not whole: %s", error)

    def _announce(self, folder: str) -> None:
        self.is_announced = True
        self.world.post(f"{self.key}/folder", folder)

    def _written(self, folder: Path) -> OSError | None:
        """Write and flush the files. Returns the OSError of a disk that refuses."""
        files, self.files = self.files, {}
        try:
            for name, content in files.items():
                with (folder / name).open("wb") as file:
                    file.write(content.getbuffer())
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            return error
        return None


def _serialize(tensors: Mapping[str, Tensor]) -> dict[str, io.BytesIO]:
    """The files of this process in PyTorch's format, by name. Collective."""
    memory = _Memory()
    writer = FileSystemWriter("", sync_files=False)
    writer.fs = cast(Any, memory)  # it uses only the interface of FileSystemBase
    dcp.save(dict(tensors), storage_writer=writer)
    return memory.files


class _OpenBuffer(io.BytesIO):
    """A file in memory that outlives its `close`."""

    def close(self) -> None:
        self.seek(0)


class _Memory(FileSystemBase):
    """A file system in memory."""

    def __init__(self) -> None:
        self.files: dict[str, io.BytesIO] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        self.files[str(path)] = _OpenBuffer()
        yield self.files[str(path)]

    def concat_path(self, path: Any, suffix: str) -> str:
        return str(Path(path) / suffix)

    def init_path(self, path: Any) -> str:
        return str(path)

    def rename(self, path: Any, new_path: Any) -> None:
        self.files[str(new_path)] = self.files.pop(str(path))

    def mkdir(self, path: Any) -> None:
        return None

    def exists(self, path: Any) -> bool:
        return str(path) in self.files

    def rm_file(self, path: Any) -> None:
        del self.files[str(path)]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
