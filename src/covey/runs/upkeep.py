"""Maintenance of a run's checkpoints while no process trains in it: list, verify, repair."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from covey.errors import CheckpointError, RunFolderError
from covey.runs import checkpoint, checksums
from covey.runs.lock import FolderLock
from covey.runs.storage import checksum, temporary_sibling

_CORRUPT = re.compile(r"(checkpoint-\d+)\.corrupt(-\d+)?")


@dataclass(frozen=True, kw_only=True)
class Held:
    """A checkpoint on disk, unverified."""

    path: Path
    step: int
    saved: float | None
    """Seconds since 1970 when its manifest was written; None without one."""
    size: int
    """Bytes."""
    kind: str
    """`resumable`, `weights only` (`save_only_model`), `damaged` (a file is missing or of another size), or `foreign` (not Covey's)."""
    is_best: bool


@dataclass(frozen=True, kw_only=True)
class Mended:
    """Actions of `repair`."""

    copied: tuple[str, ...] = ()
    """`checkpoint-20/tokenizer.json from checkpoint-10`."""
    renamed: tuple[str, ...] = ()
    """`checkpoint-20 is now checkpoint-20.corrupt`, or the other way round."""
    damaged: tuple[str, ...] = ()
    """Checkpoints that stay damaged, and why."""
    resumes_from: Path | None = None


def held(run_dir: Path) -> list[Held]:
    """Every `checkpoint-N` of a run, oldest first. Raises RunFolderError for what is no folder."""
    expect_folder(run_dir)
    best = best_of(run_dir)
    checkpoints = []
    for path in checkpoint.checkpoints(run_dir):
        sealed = path / checksums.NAME
        checkpoints.append(
            Held(
                path=path,
                step=checkpoint.step_of(path),
                saved=sealed.stat().st_mtime if sealed.is_file() else None,
                size=sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink()),
                kind=_kind(path),
                is_best=best == path.name,
            )
        )
    return checkpoints


def best_of(run_dir: Path) -> str | None:
    """The name of the checkpoint with the best evaluation, as the newest `trainer_state.json` that can be read says."""
    for path in reversed(checkpoint.checkpoints(run_dir)):
        try:
            state = json.loads((path / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        if isinstance(state, dict):  # each holds the whole log, so earlier ones are not read
            named = state.get("best_model_checkpoint")
            return Path(str(named)).name if named else None
    return None


def prune(run_dir: Path, keep: int, *, is_dry: bool = False) -> list[Path]:
    """Delete the oldest checkpoints beyond `keep`, never the best nor the newest good one; returns them. `is_dry`: only name them.

    Raises RunFolderError while a run trains in the folder, CheckpointError where no checkpoint verifies.
    """
    expect_folder(run_dir)
    with FolderLock(run_dir):
        best = best_of(run_dir)
        ours = [path for path in checkpoint.checkpoints(run_dir) if checksums.is_ours(path)]
        if len(ours) > keep and all(checksums.problems(path) for path in ours):
            raise CheckpointError(
                f"No checkpoint in {run_dir} is whole, so none is deleted; covey checkpoints repair first."
            )
        return checkpoint.excess(run_dir, keep, best=best) if is_dry else checkpoint.prune(run_dir, keep, best=best)


def repair(run_dir: Path) -> Mended:
    """Remove leftovers of killed saves, repair damaged files from copies, set aside checkpoints that cannot be repaired.

    A file is taken from another checkpoint (or a `.corrupt` one) of the run only where its size and xxh3-128 are those that the
    damaged checkpoint's manifest names, so a mended checkpoint is what it was, byte by byte. A checkpoint that was set aside and
    is whole again gets its name back. Nothing is deleted but temporary folders. Raises RunFolderError while a run trains there.
    """
    expect_folder(run_dir)
    with FolderLock(run_dir):
        checkpoint.clear_leftovers(run_dir)
        copied: list[str] = []
        for path in _candidates(run_dir):
            copied += _mend(path, [other for other in _candidates(run_dir) if other != path])
        renamed = [*_put_back(run_dir), *_set_aside(run_dir)]
        damaged = [f"{path.name}: {'; '.join(wrong)}" for path in _candidates(run_dir) if (wrong := _wrong(path))]
        good = [path for path in checkpoint.checkpoints(run_dir) if not checksums.problems(path)]
        newest = next((path for path in reversed(good) if _kind(path) == "resumable"), None)
        return Mended(copied=tuple(copied), renamed=tuple(renamed), damaged=tuple(damaged), resumes_from=newest)


def expect_folder(run_dir: Path) -> None:
    """Raise RunFolderError unless it is a folder."""
    if not run_dir.is_dir():
        raise RunFolderError(f"{run_dir} is no folder; give the folder of a run, such as runs/train-1.")


def _kind(path: Path) -> str:
    if not checksums.is_ours(path):
        return "foreign"
    if not checksums.is_complete(path):
        return "damaged"
    return "resumable" if (path / f"{checkpoint.STATE}.json").exists() else "weights only"


def _wrong(path: Path) -> list[str]:
    """Faults of a checkpoint, whichever name it has now."""
    return [fault for fault in checksums.problems(path) if not fault.startswith(f"{checksums.NAME} is of step")]


def _candidates(run_dir: Path) -> list[Path]:
    """Checkpoints that Covey wrote, and those that were set aside; links are left alone."""
    aside = sorted(path for path in run_dir.iterdir() if path.is_dir() and _CORRUPT.fullmatch(path.name))
    folders = [*checkpoint.checkpoints(run_dir), *aside]
    return [path for path in folders if checksums.is_ours(path) and not path.is_symlink()]


def _mend(path: Path, others: list[Path]) -> list[str]:
    """Put back the files of a checkpoint that differ, where another holds the same bytes."""
    try:
        entries = checksums.read(path)["files"]
    except CheckpointError:
        return []  # no manifest lists its files
    repaired = []
    for name, entry in entries.items():
        if not checksums.problem(path, name, entry):
            continue
        source = next((other for other in others if not checksums.problem(other, name, entry)), None)
        if source is not None:
            _copy(source / name, path / name)
            repaired.append(f"{path.name}/{name} from {source.name}")
    return repaired


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(target)
    try:
        shutil.copyfile(source, temporary, follow_symlinks=False)
        checksum(temporary, flush=True)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _put_back(run_dir: Path) -> Iterator[str]:
    """Checkpoints that were set aside and are whole, under their own names again."""
    for path in _candidates(run_dir):
        named = _CORRUPT.fullmatch(path.name)
        if named is None or _wrong(path) or (run_dir / named[1]).exists():
            continue
        if checksums.read(path)["step"] == checkpoint.step_of(Path(named[1])):
            path.rename(run_dir / named[1])
            yield f"{path.name} is {named[1]} again"


def _set_aside(run_dir: Path) -> Iterator[str]:
    for path in checkpoint.checkpoints(run_dir):
        if checksums.is_ours(path) and not path.is_symlink() and checksums.problems(path):
            yield f"{path.name}: {checkpoint.set_aside(path).strip().rstrip('.')}"
