"""Files that are whole or absent: write aside, flush to the disk, rename. And what a disk that refuses says."""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

import xxhash

from covey.errors import StorageError

REFUSALS = {
    errno.ENOSPC: "no space is left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EIO: "the disk reports an input/output error",
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "writing there is not permitted",
    errno.EPERM: "writing there is not permitted",
    errno.EFBIG: "the file is larger than the disk allows",
    errno.ESTALE: "the network disk has lost the file",
}
"""Errors of the system that are a disk's or its owner's, in words."""
# Rust libraries (safetensors, tokenizers) and torch's zip writer tell the number, or the fact, in words only.
_OS_ERROR = re.compile(r"\((?:os )?error (\d+)\)|\[errno (\d+)\]", re.IGNORECASE)
_TORN = "the disk took only a part of the file"
_TORN_WRITER = re.compile(r"iostream error|PytorchStreamWriter|inline_container.*unexpected pos")


def refusal(error: BaseException, what: str, path: Path) -> StorageError | None:
    """The StorageError that says why the disk did not take `what`, or None when the error has another cause.

    Looks through the chain of causes, and through messages of libraries that hide the error number in words.
    """
    reason = why_refused(error)
    if reason is None:
        return None
    return StorageError(
        f"{what} could not be written to {path}: {reason} ({_free(path)} free). Whatever was saved before is intact; "
        "free some space, lower save_total_limit, or choose another output_dir."
    )


def why_refused(error: BaseException, numbers: Collection[int] = tuple(REFUSALS)) -> str | None:
    """The reason in words, where the error or one of its causes is of the disk and of these numbers."""
    known = {REFUSALS[number] for number in numbers} | {_TORN}
    return next((reason for link in _chain(error) if (reason := _reason(link)) in known), None)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file: after a crash it holds the old content or the new, never a part. OSError when the disk refuses."""
    temporary = temporary_beside(path)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def temporary_beside(path: Path) -> Path:
    """A name in the same folder that no one else uses; a reader never takes it for a finished file."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}")


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk: a rename is durable only after this."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path, *, flush: bool = False) -> str:
    """xxh3-128 of a file's content, in hex. `flush` also brings the file to the disk first.

    It finds accidents (torn writes, flipped bits), not a forger.
    """
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        if flush:
            os.fsync(file.fileno())
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def remove_tree(path: Path) -> None:
    """Delete a folder as far as the disk lets us; a missing one is fine."""
    shutil.rmtree(path, ignore_errors=True)


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    for _ in range(20):
        if link is None:
            return
        yield link
        link = link.__cause__ or link.__context__


def _reason(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in REFUSALS:
        return REFUSALS[error.errno]
    text = str(error)
    if found := _OS_ERROR.search(text):
        return REFUSALS.get(int(found[1] or found[2]))
    return _TORN if _TORN_WRITER.search(text) else None


def _free(path: Path) -> str:
    while not path.exists() and path != path.parent:
        path = path.parent
    free = shutil.disk_usage(path).free
    return f"{free / 1e9:.1f} GB" if free >= 1e9 else f"{free / 1e6:.1f} MB"
