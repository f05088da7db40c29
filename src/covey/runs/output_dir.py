"""`output_dir` before a run begins: refused, made, or cleared of an earlier run."""

import os
import re
import warnings
from pathlib import Path

from covey.errors import RunFolderError
from covey.files.places import refuse_variable
from covey.runs import checkpoint, completions, evaluations, traces
from covey.runs.lock import CHECKPOINT, refuse_trespass
from covey.runs.metrics import read

BAD_STEPS = "bad_steps"
_RECORDS = (
    *("run.json", "train.yaml", "metrics.jsonl", "events.jsonl", "alerts.jsonl", "rollouts", traces.FOLDER),
    *(evaluations.LOG, evaluations.FOLDER, BAD_STEPS, completions.FOLDER),
    "runs",  # TensorBoard's, as transformers names it
)
_HARMLESS = re.compile(r"\..*|previous-\d+|.*\.(log|out|err)")
"""Foreign files that may be in a run's folder: hidden files, earlier runs, logs of a scheduler."""


def checked(path: str | os.PathLike[str]) -> Path:
    """The path of a folder. RunFolderError for what cannot be one."""
    text = os.fspath(path)
    if not text or "\0" in text:
        raise RunFolderError(f"output_dir {text!r} is not the path of a folder; give one such as runs/first.")
    refuse_variable("output_dir", text)
    return Path(text).expanduser()


def expect_usable(path: str | os.PathLike[str], resume: Path | None, restarts: bool) -> None:
    """Raise what `RunFolder.locked(strict=True)` would raise, and make nothing."""
    folder = checked(path)
    refuse_trespass(folder)
    if not is_inside(resume, folder):
        refuse_occupied(folder, restarts)
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise RunFolderError(f"output_dir {folder} is a file; give the path of a folder.")
    _refuse_unwritable(there)


def is_inside(resume: Path | None, folder: Path) -> bool:
    """True for a checkpoint of the run in this folder."""
    return resume is not None and resume.resolve().parent == folder.resolve()


def _refuse_unwritable(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RunFolderError(f"output_dir {folder} cannot be written to; choose another, or change its permissions.")


def make(folder: Path) -> None:
    """Make the folder. RunFolderError where it cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise RunFolderError(f"output_dir {folder} is a file; give the path of a folder.") from error
    except OSError as error:
        raise RunFolderError(f"output_dir {folder} cannot be made ({error.strerror}); choose another.") from error
    _refuse_unwritable(folder)


def holds_run(folder: Path) -> bool:
    """True if the folder holds metrics, rollouts or a checkpoint. A run that failed at start-up has none."""
    if not os.path.isdir(folder):  # False, not an error, for a name that is too long
        return False
    has_metrics = (folder / "metrics.jsonl").is_file() and bool(read(folder / "metrics.jsonl"))
    return has_metrics or (folder / "rollouts").is_dir() or any(map(_is_checkpoint, folder.iterdir()))


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and CHECKPOINT.fullmatch(path.name) is not None


def refuse_occupied(folder: Path, restarts: bool) -> None:
    """Raise RunFolderError for a folder with another run or foreign files. `restarts`: a run without checkpoints is allowed."""
    if holds_run(folder):
        steps = [row["step"] for row in read(folder / "metrics.jsonl") if isinstance(row.get("step"), int)]
        steps += [checkpoint.step_of(path) for path in checkpoint.checkpoints(folder)]
        is_begun = bool(max(steps, default=0)) or (folder / "rollouts").is_dir()
        if not is_begun or (restarts and not checkpoint.checkpoints(folder)):
            return
        raise RunFolderError(
            f"{folder} holds a run already (step {max(steps, default=0)}); go on with it with --resume auto, "
            "or choose another --output-dir."
        )
    names = sorted(path.name for path in folder.iterdir()) if os.path.isdir(folder) else []
    foreign = [name for name in names if name not in _RECORDS and not _HARMLESS.fullmatch(name)]
    if foreign:
        shown = ", ".join(foreign[:3]) + (" ..." if len(foreign) > 3 else "")
        raise RunFolderError(
            f"{folder} holds files that are not a run's ({shown}); choose an empty or a new folder as --output-dir."
        )


def new_previous(folder: Path) -> Path:
    """A new `previous-N` in the folder."""
    number = 1
    while (folder / f"previous-{number}").exists():
        number += 1
    target = folder / f"previous-{number}"
    target.mkdir()
    return target


def set_aside(folder: Path) -> None:
    """Move the run in the folder to a new `previous-N`, with a warning."""
    target = new_previous(folder)
    for path in list(folder.iterdir()):
        if path.name in _RECORDS or _is_checkpoint(path):
            os.rename(path, target / path.name)
    warnings.warn(
        f"{folder} held a run already; it is now in {target}, and a new one starts. To go on with it instead, "
        "resume from its checkpoint; to keep the two apart, give another output_dir.",
        stacklevel=3,
    )
