"""Kill a save anywhere, fill its disk, fail its system calls: the newest checkpoint that verifies is complete."""

from __future__ import annotations

import os
import random
import re
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from saving import CALLS, Saver

from covey.errors import StorageError
from covey.runs import checkpoint, checksums
from kit import rest_nightly


def expect_complete(path: Path | None, steps: set[int]) -> None:
    """`path` verifies, is one of `steps`, and its parts belong together."""
    assert path is not None
    step = checkpoint.step_of(path)
    assert step in steps
    assert checksums.problems(path) == []
    state = checkpoint.load_state(path)
    assert state["step"] == step
    assert torch.equal(state["x"], torch.full((64,), step))


def latest_quietly(run: Path) -> Path | None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a kill must not even leave a damaged checkpoint behind
        return checkpoint.resolve("auto", run)


def fill(disk: Path) -> Path:
    """Write until the disk is full; the file to delete to free it."""
    ballast = disk / "ballast"
    try:
        with open(ballast, "wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
    except OSError:
        return ballast


def test_a_full_disk_refuses_the_save_and_leaves_the_old_one_intact(small_disk: Path) -> None:
    def write(folder: Path) -> None:
        save_file({"weight": torch.zeros(25_000)}, folder / "model.safetensors")

    run = small_disk / "run"
    first = checkpoint.save(run, 1, write, {"step": 1}, keep=1)
    ballast = fill(small_disk)
    with pytest.raises(StorageError, match=r"checkpoint-2 could not be written .* no space is left on the disk"):
        checkpoint.save(run, 2, write, {"step": 2}, keep=1)
    assert [path.name for path in run.iterdir()] == ["checkpoint-1"]
    assert latest_quietly(run) == first
    ballast.unlink()
    second = checkpoint.save(run, 2, write, {"step": 2}, keep=1)
    assert [path.name for path in run.iterdir()] == ["checkpoint-2"]
    assert latest_quietly(run) == second


def write_text(folder: Path) -> None:
    (folder / "big.txt").write_text("x" * 500_000)


def write_safetensors(folder: Path) -> None:
    save_file({"weight": torch.zeros(200_000)}, folder / "model.safetensors")


def write_torch(folder: Path) -> None:
    torch.save(torch.zeros(200_000), folder / "optimizer.pt")


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({str(i): i for i in range(50_000)}, unk_token="1")).save(str(folder / "tokenizer.json"))


def write_model(folder: Path) -> None:
    from kit import tiny_model

    tiny_model("qwen2").save_pretrained(folder)
    write_text(folder)


@pytest.mark.parametrize("write", [write_text, write_safetensors, write_torch, write_tokenizer, write_model])
def test_every_library_that_meets_a_full_disk_gives_the_same_sentence(
    write: Callable[[Path], None], small_disk: Path
) -> None:
    with pytest.raises(StorageError, match="checkpoint-1 could not be written"):
        checkpoint.save(small_disk, 1, write, {})
    assert list(small_disk.iterdir()) == []


def test_the_state_that_fills_the_disk_is_refused_too(small_disk: Path) -> None:
    with pytest.raises(StorageError, match="no space is left"):
        checkpoint.save(small_disk, 1, lambda folder: None, torch.zeros(200_000))
    assert list(small_disk.iterdir()) == []


def calls_of_a_save(saver: Saver, run: Path, step: int = 2) -> list[str]:
    """The system calls of the second of two saves, the pruning of the first included, in order."""
    assert saver.save(run, 1, "-o", "/dev/null") == 0
    log = run.with_suffix(".log")
    assert saver.save(run, step, "-o", str(log), "-e", f"trace={CALLS}") == 0
    return [line for line in log.read_text().splitlines() if re.match(r"\w+\(", line)]


def test_files_reach_the_disk_before_the_name_that_makes_them_count(saver: Saver, tmp_path: Path) -> None:
    run = tmp_path / "run"
    calls = calls_of_a_save(saver, run)

    def place(pattern: str) -> int:
        found = [i for i, line in enumerate(calls) if re.search(pattern, line)]
        assert found, f"no call matches {pattern}"
        return found[-1]

    commit = place(r'^rename\(".*/checkpoint-2\.tmp-[^/]*", ".*/checkpoint-2"')
    manifest = place(r"^fsync\(.*checkpoint-2\.tmp-[^/]*/\.manifest\.json\.tmp")
    manifest_named = place(r'^rename\(.*"\S*/manifest\.json"')
    named = r"(^write\(.*/{0}>)|(^renameat.*/{0}\")"  # safetensors writes under another name and renames
    for name in ("model.safetensors", "config.json", "covey_state.json", "covey_state.safetensors"):
        written, flushed = place(named.format(name)), place(rf"^fsync\(.*/{name}>")
        assert written < flushed < manifest
    folder = place(r"^fsync\(\d+<[^>]*checkpoint-2\.tmp-[^/>]*>")
    pruned = place(r'^rename\(".*/checkpoint-1", ')
    assert manifest < manifest_named < folder < commit < place(rf"^fsync\(\d+<{run}>") < pruned


@pytest.mark.slow
@pytest.mark.parametrize("step", rest_nightly([2, 1], 1), ids=["next", "same-step-again"])
def test_a_save_killed_at_any_system_call_never_loses_a_checkpoint(saver: Saver, step: int, tmp_path: Path) -> None:
    counts: dict[str, int] = {}
    for line in calls_of_a_save(saver, tmp_path / "counted", step):
        call = line.partition("(")[0]
        counts[call] = counts.get(call, 0) + 1
        run = tmp_path / f"{call}-{counts[call]}"
        assert saver.save(run, 1, "-o", "/dev/null") == 0
        kill = f"inject={call}:signal=SIGKILL:when={counts[call]}"
        assert saver.save(run, step, "-o", "/dev/null", "-e", f"trace={call}", "-e", kill) == -signal.SIGKILL
        path = latest_quietly(run)
        expect_complete(path, {1, step})
        left = [path.name for path in run.iterdir()]
        assert all(re.fullmatch(r"checkpoint-\d", name) for name in left), left  # no leftovers
    assert sum(counts.values()) > 40


@pytest.mark.parametrize(
    "fault", rest_nightly(["write:error=ENOSPC", "rename:error=EROFS", "fsync:error=EIO", "write:error=EDQUOT"], 1)
)
def test_a_system_call_that_fails_once_refuses_the_save_or_is_told(saver: Saver, fault: str, tmp_path: Path) -> None:
    call = fault.partition(":")[0]
    calls = [line for line in calls_of_a_save(saver, tmp_path / "counted") if line.startswith(call + "(")]
    for number, line in enumerate(calls, start=1):
        run = tmp_path / f"{number}" / "run"
        checkpoint.save(run, 1, lambda folder: None, {"step": 1, "x": torch.full((64,), 1)})
        inject = ["-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={fault}:when={number}"]
        code = saver.save(run, 2, *inject)
        is_committed = "checkpoint-1" in line or re.search(rf"<{tmp_path}/counted>", line)
        if code == 74:
            assert "checkpoint-2 could not be written" in (run.parent / "refused").read_text()
            expect_complete(latest_quietly(run), {1, 2} if is_committed else {1})
        else:
            assert code == 0
            assert is_committed, f"{line} failed and the save went on"
            expect_complete(latest_quietly(run), {2})
        assert saver.save(run, 3, "-o", "/dev/null") == 0  # once the disk is well again
        expect_complete(latest_quietly(run), {3})


@pytest.mark.slow
def test_random_kills_in_the_middle_of_saving_never_lose_a_checkpoint(saver: Saver, tmp_path: Path) -> None:
    run, at = tmp_path / "run", 1
    checkpoint.save(run, 1, lambda folder: None, {"step": 1, "x": torch.full((64,), 1)})
    for seed in range(10):
        child = saver.start(run, at + 1, 10_000)
        os.kill(child, signal.SIGCONT)
        time.sleep(0.05 + 0.1 * random.Random(seed).random())
        os.kill(child, signal.SIGKILL)
        assert saver.finish() == -signal.SIGKILL
        path = latest_quietly(run)
        expect_complete(path, set(range(at, 10_001)))
        assert path is not None
        at = checkpoint.step_of(path)
        assert len(list(run.iterdir())) <= 2  # killed before pruning: the last two
    assert at > 10
