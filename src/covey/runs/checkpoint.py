"""Checkpoints that are whole or absent, verified, and never lost by saving the next one.

A save writes to a staging folder, flushes it, seals it with a manifest of checksums, renames it to `checkpoint-N`,
reads it back, and only then deletes old ones. A process may be killed at any moment: the newest `checkpoint-N`
that verifies is complete. Only the main process saves and chooses; the other ranks receive the path.
"""

import errno
import os
import re
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from covey.errors import CheckpointError, CoveyError, StorageError
from covey.runs import status
from covey.runs.checksums import is_ours, problems, seal
from covey.runs.storage import ABSENT, refusal, remove_tree, sync_folder

STATE = "covey_state"
_FINISHED = re.compile(r"checkpoint-(\d+)")
_LEFTOVER = re.compile(r"checkpoint-(\d+)\.(tmp|old)-(\d+)-[0-9a-f]{8}")
_SET_ASIDE = re.compile(r"checkpoint-(\d+)\.corrupt(-\d+)?")

Resume = str | os.PathLike[str] | bool | None
"""`"auto"`: the newest good checkpoint, or a fresh start. True: the newest good one. `"never"`, False, None: a fresh start.
Else the path of a checkpoint or of a run folder."""


def save(
    run_dir: Path,
    step: int,
    write: Callable[[Path], object],
    state: Any,
    *,
    keep: int | None = None,
    best: str | None = None,
) -> Path:
    """Save `checkpoint-<step>` and return its path; it has been read back and every byte found right.

    `write(folder)` puts in the model, the tokenizer and other files that tools expect; `state` (a tree as in `serial`) is written
    with them. `keep` is `save_total_limit`: older checkpoints beyond that number are deleted, never `best` (a name or
    path) and never before the new one is verified. Raises StorageError when the disk refuses: nothing is left behind then,
    and the earlier checkpoints are as they were.
    """
    from covey.runs import serialization  # with torch, which a list of checkpoints does not wait for

    try:
        staging = stage(run_dir, step)
        descriptor = os.open(staging, os.O_RDONLY)  # open, so that no folder made later has its number
    except OSError as error:
        raise _refused(error, step, run_dir, isinstance(error, ABSENT)) from error
    try:
        write(staging)
        serialization.write(state, staging / STATE)
        if _is_replaced(staging, descriptor):  # libraries make a folder that is gone again, without the files before
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(staging))
        path = commit(staging)
    except BaseException as error:
        is_gone = all(_is_replaced(folder, descriptor) for folder in (staging, run_dir / f"checkpoint-{step}"))
        remove_tree(staging)
        refused = _refused(error, step, run_dir, is_gone)
        if refused is error:
            raise
        raise refused from error
    finally:
        os.close(descriptor)
    prune(run_dir, keep, best=best, verified=path)
    return path


def _refused(error: BaseException, step: int, run_dir: Path, is_gone: bool) -> BaseException:
    """The StorageError of a disk that refused a checkpoint, or whose folder for it `is_gone`; else the error itself."""
    refused = refusal(error, f"checkpoint-{step}", run_dir)
    if refused is None and is_gone and isinstance(error, Exception) and not isinstance(error, CoveyError):
        return StorageError(
            f"checkpoint-{step} could not be written to {run_dir}: the folder was deleted or moved ({error})."
        )
    return refused or error


def _is_replaced(folder: Path, descriptor: int) -> bool:
    try:
        return not os.path.samestat(os.stat(folder), os.fstat(descriptor))
    except OSError:
        return True


def stage(run_dir: Path, step: int) -> Path:
    """A new empty staging folder for `checkpoint-<step>`; leftovers of killed saves are removed first."""
    run_dir.mkdir(parents=True, exist_ok=True)
    clear_leftovers(run_dir)
    staging = run_dir / f"checkpoint-{step}{_suffix('tmp')}"
    staging.mkdir()
    return staging


def commit(staging: Path) -> Path:
    """Make a staged folder the checkpoint: flush, seal, rename, flush the name, read back.

    Raises StorageError when what is read back differs, OSError when the disk refuses.
    """
    run_dir, name = staging.parent, staging.name.partition(".")[0]
    final = run_dir / name
    seal(staging, int(name.removeprefix("checkpoint-")))
    displaced = None
    if final.exists():  # a folder cannot be renamed onto another; see clear_leftovers for a crash between the two
        displaced = run_dir / f"{name}{_suffix('old') if is_ours(final) else _foreign_suffix(final)}"
        os.rename(final, displaced)
    os.rename(staging, final)
    sync_folder(run_dir)
    if wrong := problems(final):
        fate = set_aside(final)
        raise StorageError(f"{final} was written but reads back wrong ({'; '.join(wrong)}). {fate}Check the disk.")
    if displaced is not None and _LEFTOVER.fullmatch(displaced.name):
        remove_tree(displaced)
    return final


def load_state(checkpoint: Path) -> Any:
    """The state tree of a checkpoint, tensors on the CPU. Raises CheckpointError when it is missing or damaged."""
    from covey.runs import serialization

    return serialization.read(checkpoint / STATE)


def resolve(resume: Resume, run_dir: Path) -> Path | None:
    """The checkpoint to continue from, verified; None: start afresh.

    Raises CheckpointError (exit code 4) rather than starting again from step 0 when checkpoints exist but none is good.
    """
    if resume is None or resume is False or resume == "never":
        return None
    if resume is not True and resume != "auto":
        return _named(Path(resume).expanduser())
    clear_leftovers(run_dir)
    newest = latest(run_dir, quarantine=True)
    if newest is None and resume is True:
        raise CheckpointError(f"There is no checkpoint in {run_dir} to resume from; resume 'auto' starts afresh then.")
    return newest


def latest(run_dir: Path, *, quarantine: bool = False, is_resumed: bool = True) -> Path | None:
    """The newest checkpoint of which every byte is right; None when none was ever saved.

    A damaged one is passed over with a warning that names the file; with `quarantine`, which only the process that trains
    asks for, it is also renamed `checkpoint-N.corrupt`. Raises CheckpointError when none is left; its advice is for a run that
    resumes, or for a command that reads weights (`is_resumed=False`).
    """
    paths = checkpoints(run_dir)[::-1]
    ours = [path for path in paths if is_ours(path)]
    foreign = [path.name for path in paths if path not in ours and path.is_dir()]
    for at, path in enumerate(ours):
        if wrong := problems(path):
            if not path.is_dir():  # pruned since: the run goes on, and has saved a newer one
                return latest(run_dir, quarantine=quarantine, is_resumed=is_resumed)
            fate = [set_aside(path).rstrip()] if quarantine else []
            fate += ["The one before is tried."] * (at + 1 < len(ours))
            warnings.warn(" ".join([f"{path} is damaged: {'; '.join(wrong)}.", *fate]), stacklevel=2)
            continue
        if newer := [name for name in foreign if paths.index(run_dir / name) < paths.index(path)]:
            verb = "resuming from" if is_resumed else "these weights are of"
            warnings.warn(f"{', '.join(newer)} in {run_dir} are not Covey's; {verb} {path.name}.", stacklevel=2)
        return path
    if len(ours) + len(foreign) < len(paths):  # pruned likewise
        return latest(run_dir, quarantine=quarantine, is_resumed=is_resumed)
    if foreign:
        raise CheckpointError(_only_foreign(run_dir, foreign, is_resumed))
    if ours or any(_SET_ASIDE.fullmatch(path.name) for path in _folders(run_dir)):
        otherwise = "start again with resume 'never'" if is_resumed else "name other weights"
        raise CheckpointError(f"Every checkpoint in {run_dir} is damaged; restore one from a copy, or {otherwise}.")
    return None


def _only_foreign(run_dir: Path, names: Sequence[str], is_resumed: bool) -> str:
    holds = f"{run_dir} holds {', '.join(names[:3])}, which Covey did not write"
    if not is_resumed:
        return f"{holds}; name the one that you mean, such as {run_dir / names[0]}."
    return (
        f"{holds}, so training cannot resume exactly; "
        f"start from those weights with model={str(run_dir / names[0])!r} and resume 'never'."
    )


def checkpoints(run_dir: Path) -> list[Path]:
    """Every `checkpoint-N` of a run, oldest step first, unverified."""
    named = [(int(match[1]), path) for path in _folders(run_dir) if (match := _FINISHED.fullmatch(path.name))]
    return [path for _, path in sorted(named)]


def step_of(checkpoint: Path) -> int:
    """The N of `checkpoint-N`."""
    match = _FINISHED.fullmatch(checkpoint.name)
    if match is None:
        raise CheckpointError(f"{checkpoint} is not named checkpoint-<step>; give the folder its name back.")
    return int(match[1])


def prune(run_dir: Path, keep: int | None, *, best: str | None = None, verified: Path | None = None) -> list[Path]:
    """Delete the checkpoints that `excess` names and return them. A delete that fails is a warning."""
    return [path for path in excess(run_dir, keep, best=best, verified=verified) if _delete(path)]


def excess(run_dir: Path, keep: int | None, *, best: str | None = None, verified: Path | None = None) -> list[Path]:
    """The oldest checkpoints beyond `keep` (None or 0: keep all).

    Never among them: `best`, the newest one that verifies (`verified`, when the caller has just checked it), anything newer, and
    checkpoints that Covey did not write. With none that verifies there is none.
    """
    ours = [path for path in checkpoints(run_dir) if is_ours(path) and not path.is_symlink()]
    if not keep or keep < 0 or len(ours) <= keep:
        return []
    verified = verified or next((path for path in reversed(ours) if not problems(path)), None)
    if verified is None:
        return []
    ours = [path for path in ours if step_of(path) <= step_of(verified)]
    safe = {verified.name} | ({Path(best).name} if best else set())
    number = max(0, len(ours) - max(keep, sum(path.name in safe for path in ours)))
    return [path for path in ours if path.name not in safe][:number]


def clear_leftovers(run_dir: Path) -> None:
    """Remove leftovers of killed processes, by our own temporary names only; a checkpoint caught in mid-swap is restored."""
    for path in _folders(run_dir):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or (int(match[3]) != os.getpid() and status.is_alive(int(match[3]))):
            continue
        final = run_dir / f"checkpoint-{match[1]}"
        if match[2] == "old" and not final.exists():
            os.rename(path, final)
        else:
            remove_tree(path)


def _named(path: Path) -> Path:
    """The checkpoint at a path that the user gave: a checkpoint, or a run folder."""
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; give the path of a checkpoint or of a run folder.")
    if not is_ours(path):
        if not checkpoints(path):
            raise CheckpointError(
                f"{path} holds no checkpoint that Covey wrote; to start from its weights give it as the model instead."
            )
        newest = latest(path)
        assert newest is not None  # it has checkpoints, so latest returns one or raises
        return newest
    if wrong := problems(path):
        raise CheckpointError(f"{path} is damaged: {'; '.join(wrong)}. Resume from another checkpoint, or with 'auto'.")
    return path


def set_aside(path: Path) -> str:
    """Rename a bad checkpoint, so that nothing takes it for a good one, and say so; it is never deleted."""
    numbers: Iterator[str] = ("" if n == 1 else f"-{n}" for n in range(1, 10_000))
    target = next(t for n in numbers if not (t := path.with_name(f"{path.name}.corrupt{n}")).exists())
    try:
        os.rename(path, target)
    except OSError as error:
        return f"It could not be renamed ({error.strerror}). "
    return f"It is now {target.name}. "


def _delete(path: Path) -> bool:
    """Rename first, so that a kill in the middle of deleting never leaves half a checkpoint under a good name."""
    doomed = path.with_name(f"{path.name}{_suffix('tmp')}")
    try:
        os.rename(path, doomed)
    except OSError as error:
        warnings.warn(
            f"The old checkpoint {path} could not be deleted ({error.strerror}); training goes on.", stacklevel=3
        )
        return False
    remove_tree(doomed)
    return True


def _folders(run_dir: Path) -> list[Path]:
    return [path for path in run_dir.iterdir() if path.is_dir()] if run_dir.is_dir() else []


def _suffix(kind: Literal["tmp", "old"]) -> str:
    return f".{kind}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _foreign_suffix(path: Path) -> str:
    """For a folder that Covey did not write but whose name is needed: it is kept."""
    warnings.warn(f"{path} was not written by Covey; it is kept with .foreign in its name.", stacklevel=4)
    return f".foreign-{uuid.uuid4().hex[:8]}"
