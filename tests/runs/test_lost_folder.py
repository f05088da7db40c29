"""A run folder that is deleted, moved or replaced while its run goes on: nothing is lost, and nothing is written over another run."""

from __future__ import annotations

import errno
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import TrainerCallback

from covey.errors import RunFolderError, StorageError
from covey.runs import RunFolder, checkpoint, manifest
from covey.runs.metrics import read
from covey.types import Event
from faults.small_runs import ROWS, lines, trainer
from forked import Forked

LOSSES: dict[str, Callable[[Path], object]] = {
    "deleted": shutil.rmtree,
    "moved": lambda run: os.rename(run, run.with_name("elsewhere")),
    "run.json deleted": lambda run: (run / "run.json").unlink(),
    "lock deleted": lambda run: (run / ".lock").unlink(),
    "replaced by an earlier copy": lambda run: (os.rename(run, run.with_name("elsewhere")), os.rename(run.with_name("copy"), run)),
}  # fmt: skip


def begun(path: Path) -> RunFolder:
    """A run after three steps, with a copy of its folder after the first one."""
    run = RunFolder.create(path)
    run.describe(args={"seed": 7})
    for step in (1, 2, 3):
        run.append_metrics(step, {"reward": step / 10})
        run.append_events(step, [Event(kind="spike", said="A spike.")])
        if step == 1:
            shutil.copytree(
                path, path.with_name("copy"), ignore=shutil.ignore_patterns(".lock")
            )  # to close it is to unlock it
    return run


def logged(path: Path, name: str = "metrics.jsonl") -> list[int]:
    return [row["step"] for row in read(path / name)]


def locked_by_another(folder: Path) -> int:
    """Exit code of another process that locks the folder; 1 where it is in use."""
    code = "from pathlib import Path; from covey.runs.lock import FolderLock; FolderLock(Path.cwd()).take()"
    return Forked("-c", code, cwd=folder).wait(60)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_run_whose_folder_is_lost_keeps_its_name_and_its_lines(loss: str, tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    before = manifest.load(run.path / "run.json")
    LOSSES[loss](run.path)
    with pytest.warns(UserWarning, match=f"{run.path} was deleted, moved or replaced.* after step 3") as seen:
        run.append_metrics(4, {})
    run.append_events(4, [Event(kind="spike", said="A spike.")])
    assert len(seen) == 1
    assert ("elsewhere" in str(seen[0].message)) == (run.path.with_name("elsewhere").exists())
    assert logged(run.path) == logged(run.path, "events.jsonl") == [1, 2, 3, 4]
    now = manifest.load(run.path / "run.json")
    assert (now["id"], now["state"]) == (before["id"], "running")
    assert locked_by_another(run.path) == 1
    run.close()
    assert manifest.load(run.path / "run.json")["attempts"][-1]["to_step"] == 4
    assert locked_by_another(run.path) == 0


def test_a_log_that_is_deleted_is_written_again_whole(tmp_path: Path) -> None:
    begun(tmp_path / "run").close()
    checkpoint.save(tmp_path / "run", 2, lambda folder: None, {})
    run = RunFolder.create(tmp_path / "run", resume=tmp_path / "run" / "checkpoint-2")
    run.metrics.path.unlink()  # before a line of the resumed run
    with pytest.warns(UserWarning, match=r"metrics.jsonl was deleted or moved in the middle of the run"):
        run.append_metrics(3, {})
    assert logged(run.path) == [1, 2, 3]
    os.rename(run.metrics.path, tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match=r"metrics.jsonl was deleted or moved in the middle of the run"):
        run.append_metrics(4, {})
    run.close()
    assert logged(run.path) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("is_over", "records"),
    [
        (True, lambda run: run.append_metrics(4, {})),
        (False, lambda run: run.append_events(3, [Event(kind="save_failed", said="The folder was moved.")])),
    ],
)
def test_a_run_whose_folder_another_run_has_taken_ends_without_touching_it(
    is_over: bool, records: Callable[[RunFolder], object], tmp_path: Path
) -> None:
    run = begun(tmp_path / "run")
    os.rename(run.path, tmp_path / "elsewhere")
    code = "from pathlib import Path; from covey.runs import RunFolder; run = RunFolder.create(Path('run')); run.describe(args={})\n"
    code += "run.close()" if is_over else "import time; Path('begun').touch(); time.sleep(60)"
    other = Forked("-c", code, cwd=tmp_path)
    while other.poll() is None and not (tmp_path / "begun").exists():
        time.sleep(0.01)
    assert other.returncode == (0 if is_over else None), other.err
    theirs = {path.name: path.read_bytes() for path in run.path.glob("[!.]*")}
    with pytest.raises(RunFolderError, match=f"Another run has begun in {run.path}.* ends after step 3"):
        records(run)
    run.append_events(3, [Event(kind="save_failed", said="The folder was moved.")])  # of a save that was under way
    run.close("failed")
    assert {path.name: path.read_bytes() for path in run.path.glob("[!.]*")} == theirs
    assert logged(tmp_path / "elsewhere") == [1, 2, 3]
    other.kill()
    other.wait()


def test_a_run_that_copies_its_own_folder_locks_it_again_at_its_next_line(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    shutil.copytree(run.path, tmp_path / "backup")  # which closes a descriptor of the lock
    run.append_metrics(4, {"reward": 0.4})
    assert locked_by_another(run.path) == 1, "in use"
    run.close("finished")
    assert logged(run.path) == [1, 2, 3, 4]
    assert locked_by_another(run.path) == 0


@pytest.mark.parametrize(
    "words", ["RunFolder.create(Path.cwd()).describe(args={})", "lock = FolderLock(Path.cwd()); lock.take()"]
)
def test_a_run_whose_lock_another_process_got_ends_where_that_is_a_run(words: str, tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    shutil.copytree(run.path, tmp_path / "backup")
    code = f"""
import time
from pathlib import Path
from covey.runs import RunFolder
from covey.runs.lock import FolderLock
{words}
Path({str(tmp_path)!r}, "has it").touch()
while not Path({str(tmp_path)!r}, "seen").exists(): time.sleep(0.02)
"""
    with Forked("-c", code, cwd=run.path) as other:
        until = time.monotonic() + 60
        while not (tmp_path / "has it").exists() and time.monotonic() < until:
            time.sleep(0.02)
        if words.startswith("Run"):
            with pytest.raises(RunFolderError, match="Another run has begun in .* ends after step 3"):
                run.append_metrics(4, {"reward": 0.4})
            assert logged(run.path) == []
            assert logged(run.path / "previous-1") == [1, 2, 3]
        else:
            run.append_metrics(4, {"reward": 0.4})
            assert logged(run.path) == [1, 2, 3, 4]
        (tmp_path / "seen").touch()
        other.wait(60)


def test_a_file_in_the_place_of_the_folder_costs_records_and_not_the_run(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    shutil.rmtree(run.path)
    run.path.touch()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run.append_metrics(4, {})
        run.append_metrics(5, {})
    assert [str(warning.message).split(":")[0] for warning in seen] == [
        "the folder of the run could not be written",
        "[Errno 20] Not a directory",
    ]
    with pytest.raises(StorageError, match="checkpoint-5 could not be written"):
        checkpoint.save(run.path, 5, lambda folder: None, {})
    run.path.unlink()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        run.append_metrics(6, {})
    run.close()
    assert logged(run.path) == [1, 2, 3, 4, 5, 6]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="Linux has the file that opens and cannot be read")
def test_lines_that_a_network_disk_no_longer_has_are_named_and_later_ones_are_written(tmp_path: Path) -> None:
    """What another machine deletes is no longer read through an open file there: the next lines had waited until the end."""
    run = begun(tmp_path / "run")
    shutil.rmtree(run.path)
    with open("/proc/self/mem", "rb") as unreadable:
        os.dup2(unreadable.fileno(), run.metrics._descriptor)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run.append_metrics(4, {})
        run.append_metrics(5, {})
    assert [str(warning.message).split(" (")[0] for warning in seen][:1] == [
        f"The lines of {run.metrics.path} so far are lost"
    ]
    assert len(seen) == 2
    assert manifest.load(run.path / "run.json")["state"] == "running"
    assert (logged(run.path), logged(run.path, "events.jsonl")) == ([4, 5], [1, 2, 3])
    run.close()


def test_a_disk_that_does_not_answer_is_not_taken_for_a_deleted_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tmp_path / "run")
    there = os.lstat

    def stale(path: Any, **named: Any) -> os.stat_result:
        if str(path).endswith((".lock", "run.json")):
            raise OSError(116, "Stale file handle")
        return there(path, **named)

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(os, "lstat", stale)
        run.append_metrics(4, {})
    assert logged(run.path) == [1, 2, 3, 4]
    run.close()


def test_a_checkpoint_whose_folder_is_deleted_in_the_middle_is_refused_whole(tmp_path: Path) -> None:
    """Libraries make a folder that is not there: the next file would have become a checkpoint without the first one."""

    def write(folder: Path) -> None:
        (folder / "model.safetensors").touch()
        shutil.rmtree(folder.parent)
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").touch()

    with pytest.raises(StorageError, match="checkpoint-2 could not be written .* deleted or moved"):
        checkpoint.save(tmp_path / "run", 2, write, {})
    assert checkpoint.checkpoints(tmp_path / "run") == []


def test_an_error_after_a_checkpoint_has_its_name_is_not_said_to_be_a_lost_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(folder: Path) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")  # of network disks that flush no folders

    monkeypatch.setattr(checkpoint, "sync_folder", refuses)
    with pytest.raises(OSError, match="Invalid argument"):
        checkpoint.save(tmp_path / "run", 2, lambda folder: None, {})


class Deletes(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            shutil.rmtree(args.output_dir)


def test_a_run_goes_on_and_resumes_after_its_folder_was_deleted(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="was deleted, moved or replaced") as seen:
        trainer(tmp_path / "run", max_steps=4, save_steps=4, callbacks=[Deletes()]).train()
    assert len(seen) == 1
    again = trainer(tmp_path / "run", max_steps=5, save_steps=9)
    again.train(resume_from_checkpoint=True)
    assert again.started_at == 4
    assert [row["step"] for row in lines(tmp_path / "run")] == [1, 2, 3, 4, 5]


class Moves(TrainerCallback):
    def __init__(self, again: int) -> None:
        self.again = again

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            os.rename(args.output_dir, f"{args.output_dir}-moved")
        elif state.global_step == self.again:
            os.rename(args.output_dir, f"{args.output_dir}-again")


@pytest.mark.parametrize("again", [0, 4])
def test_a_run_whose_folder_was_moved_ends_with_its_best_checkpoint_from_there(tmp_path: Path, again: int) -> None:
    def falling(completions: Any, trainer_state: Any, **columns: Any) -> list[float]:
        return [i - trainer_state.global_step for i in range(len(completions))]

    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "reward",
    }
    rows = Dataset.from_list(ROWS[:2])
    one = trainer(
        tmp_path / "run", reward_funcs=falling, max_steps=5, callbacks=[Moves(again)], eval_dataset=rows, **options
    )
    with pytest.warns(UserWarning, match="was deleted, moved or replaced"):
        one.train()
    moved = tmp_path / "run-moved"
    assert one.state.best_model_checkpoint == str(moved / "checkpoint-1")
    saved = load_file(moved / "checkpoint-1" / "model.safetensors")
    assert all(torch.equal(weight, one.model.state_dict()[name]) for name, weight in saved.items())
    assert manifest.load(moved / "run.json")["state"] == "stopped"
    run_json = manifest.load(tmp_path / "run" / "run.json")
    last = tmp_path / "run-again" if again else moved
    assert (run_json["state"], run_json["moved_to"]) == ("finished", str(last))
