"""Atomic files: write to a temporary name, flush to disk, rename. And sentences for a disk that refuses."""

import errno
import os
import re
import shutil
import stat
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NoReturn

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
_TORN_WRITER = re.compile(
    r"iostream error|PytorchStreamWriter|inline_container.*unexpected pos|\d+ requested and \d+ written"
)


ABSENT = (FileNotFoundError, NotADirectoryError, FileExistsError)
"""Errors of a folder that is gone, or has a file in its place."""
_CAUTIOUS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITES = os.O_WRONLY | os.O_RDWR
_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISREG, "a file"),
)


class NotPlainError(OSError):
    """Something else where a plain file, or a plain folder, of a run belongs: a link, a pipe, a device."""


def open_plain(path: Path, flags: int = os.O_RDONLY, *, depth: int = 1) -> int:
    """Descriptor of a plain file, opened without waiting and without following a link.

    `depth`: how many last parts of the path must be no links; those before are the user's and may be. A file that is written
    must have one name only: a write through a hard link changes the other file. Raises FileNotFoundError where there is
    nothing (and no `os.O_CREAT`), NotPlainError for anything but a plain file, OSError as the disk does.
    """
    for parent in list(path.parents)[: depth - 1]:
        refuse_link(parent)
    if os.path.lexists(path):
        _expect_file(path, os.lstat(path), flags)
    descriptor = os.open(path, flags | _CAUTIOUS, 0o644)
    try:
        _expect_file(path, os.fstat(descriptor), flags)  # it may have been replaced since
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_plain(path: Path, most: int, *, depth: int = 1) -> bytes:
    """The content of a plain file of at most `most` bytes. NotPlainError for a larger one, else as `open_plain`."""
    with open(open_plain(path, depth=depth), "rb") as file:
        return read_bounded(file, most)


def read_bounded(file: BinaryIO, most: int) -> bytes:
    """The content of an open file of at most `most` bytes. NotPlainError for a larger one."""
    content = file.read(most + 1)
    if len(content) > most:
        raise NotPlainError(errno.EFBIG, f"it is larger than {most / 1e6:.0f} MB", file.name)
    return content


def is_absent(path: Path) -> bool:
    """True if nothing has this path; False also where a disk does not answer."""
    try:
        os.lstat(path)
    except OSError as error:
        return isinstance(error, ABSENT)
    return False


def refuse_link(path: Path) -> None:
    """Raise NotPlainError where a folder of a run is a link."""
    if path.is_symlink():
        raise NotPlainError(errno.ELOOP, "it is a link, and links out of a run's folder are not followed", str(path))


def kind_of(mode: int) -> str:
    """A word for what `stat` says: a file, a folder, a link, a pipe, a socket, else a device."""
    return next((word for test, word in _KINDS if test(mode)), "a device")


def _expect_file(path: Path, facts: os.stat_result, flags: int) -> None:
    if stat.S_ISLNK(facts.st_mode):
        refuse_link(path)
    if not stat.S_ISREG(facts.st_mode):
        _refuse(path, f"it is {kind_of(facts.st_mode)}, not a file")
    if flags & _WRITES and facts.st_nlink > 1:
        _refuse(path, "it has a second name (a hard link), and a write would change that file too")


def _refuse(path: Path, reason: str) -> NoReturn:
    raise NotPlainError(errno.EINVAL, reason, str(path))


def refusal(error: BaseException, what: str, path: Path) -> StorageError | None:
    """The StorageError that says why the disk did not take `what`, or None when the error has another cause.

    Looks through the chain of causes, and through messages of libraries that hide the error number in words.
    """
    reason = why_refused(error)
    if reason is None:
        strange = next((link for link in _chain(error) if isinstance(link, NotPlainError)), None)
        sentence = strange and f"{what} was not written to {strange.filename}: {strange.strerror}."
        return StorageError(sentence) if sentence else None
    return StorageError(
        f"{what} could not be written to {path}: {reason} ({_free(path)} free). Earlier saves are intact; "
        "free some space, lower save_total_limit, or choose another output_dir."
    )


def why_refused(error: BaseException, numbers: Collection[int] = tuple(REFUSALS)) -> str | None:
    """The reason in words, where the error or one of its causes is an OSError with one of these `errno` values."""
    reasons = {REFUSALS[number] for number in numbers} | {_TORN}
    return next((reason for link in _chain(error) if (reason := _reason(link)) in reasons), None)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file: after a crash it holds the old content or the new, never a part. OSError when the disk refuses."""
    temporary = temporary_sibling(path)
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


def temporary_sibling(path: Path) -> Path:
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


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Raise StorageError, with the reason, where what a user asked for cannot be written to `path`."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or why_refused(error) or error}.") from error


def write_text(path: Path, text: str) -> Path:
    """Write a user's file, and the folders that it lies in. Returns its path; StorageError when it cannot be written."""
    path = path.expanduser()
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file to write that becomes `path`, or what a link there names, where nothing was raised, and else leaves what was there.

    It is made at once, and its folders: StorageError for a place that cannot be written comes before the work. A pipe or a
    device is written itself, and a file in a folder that takes no other.
    """
    place = Path(os.path.realpath(path))
    unfinished = temporary_sibling(place)
    with storage_errors(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        is_written_itself = path.exists() and not path.is_file()
        if not is_written_itself:
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                unfinished.touch()
                if place.exists():
                    unfinished.chmod(stat.S_IMODE(place.stat().st_mode))
            except OSError:
                is_written_itself = path.exists()
                if not is_written_itself:
                    raise
    if is_written_itself:
        yield path
        return
    try:
        yield unfinished
        with storage_errors(path):
            os.replace(unfinished, place)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to write in that becomes `path`, new or empty until then, where nothing was raised, and else leaves nothing."""
    unfinished = temporary_sibling(path)
    try:
        yield unfinished
        if path.exists():
            path.rmdir()
        unfinished.rename(path)
    finally:
        remove_tree(unfinished)


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
    if match := _OS_ERROR.search(text):
        return REFUSALS.get(int(match[1] or match[2]))
    return _TORN if _TORN_WRITER.search(text) else None


def _free(path: Path) -> str:
    while not path.exists() and path != path.parent:
        path = path.parent
    free = shutil.disk_usage(path).free
    return f"{free / 1e9:.1f} GB" if free >= 1e9 else f"{free / 1e6:.1f} MB"
