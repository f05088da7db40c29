"""Files that a run has on the disk when the disk takes no more, and the error that says so."""

import errno
import logging
import os
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from covey.errors import CoveyError, StorageError
from covey.runs import checkpoint, checksums
from covey.runs.storage import remove_tree, sync_folder, why_refused

logger = logging.getLogger(__name__)

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.ESTALE)


def describe_newest(run_dir: Path) -> str:
    """A sentence: the newest checkpoint of the run of which every byte is right, or that there is none."""
    for path in reversed(checkpoint.checkpoints(run_dir)):
        if not checksums.problems(path):
            return f"{path.name} is whole, in {run_dir}."
    return f"No checkpoint of this run is in {run_dir}."


def tell_stopped(name: str, step: int, run_dir: Path, *, saves: bool, tells: bool) -> None:
    """Log the checkpoint saved after the stop signal `name`. Raises StorageError where the disk did not take the checkpoint of `step`."""
    if saves and not (run_dir / f"checkpoint-{step}").is_dir():
        raise StorageError(
            f"Stopped by {name}, but step {step} could not be saved to {run_dir}. {describe_newest(run_dir)}"
        )
    if tells:
        how = " Go on with trainer.train(resume_from_checkpoint=True)." if checkpoint.checkpoints(run_dir) else ""
        logger.warning("Stopped by %s after step %s. %s%s", name, step, describe_newest(run_dir), how)


@contextmanager
def as_disk_errors(what: str, path: Path, run_dir: Path, numbers: Collection[int] = DISK) -> Iterator[None]:
    """Turn errors of a full, read-only or failing disk into a StorageError that names the checkpoints kept.

    `numbers`: `errno` values to convert; by default those that no change of permissions fixes.
    """
    try:
        yield
    except CoveyError:
        raise
    except Exception as error:
        reason = why_refused(error, numbers)
        if reason is None:
            raise
        place = getattr(error, "filename", None) or path
        resumes = "go on with --resume auto (resume_from_checkpoint=True in a script)"
        raise StorageError(
            f"{what} could not be written to {place}: {reason}. {describe_newest(run_dir)} Free some space, or make the disk writable again, "
            f"and {resumes if checkpoint.checkpoints(run_dir) else 'start again'}."
        ) from error


def write_whole(folder: Path, write: Callable[[Path], object]) -> list[str]:
    """Let `write(folder)` write its files aside, and move them into `folder` once all are on the disk; their names there.

    Files of these names are replaced, others stay. A failure on the way leaves the folder as it was.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        write(aside)
        names = sorted(entry.name for entry in aside.iterdir())
        for path in aside.rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        for path in sorted(aside.rglob("*")):
            target = folder / path.relative_to(aside)
            target.mkdir(exist_ok=True) if path.is_dir() else os.replace(path, target)
        sync_folder(folder)
        return names
    finally:
        remove_tree(aside)
        if is_new and not any(folder.iterdir()):
            folder.rmdir()
