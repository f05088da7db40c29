"""Checkpoints written beside training: killed anywhere, refused by a full disk, asked to stop; nothing good is ever lost."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_runs import stopped, trainer
from transformers import TrainerCallback

from covey.errors import StorageError
from covey.runs import checkpoint, checksums
from kit import tiny_model

HERE = Path(__file__).parent


class Runs:
    """Asks the server for training runs, and kills them. Use as a context manager."""

    def __enter__(self) -> Runs:
        command = [sys.executable, str(HERE / "async_runs.py"), str(HERE.parent)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.server = subprocess.Popen(command, text=True, env=environment, **pipes)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.communicate()

    def train(self, folder: Path, steps: int, kill_after: float | None = None, in_write: bool = False) -> int:
        """Run to the end, or for so many seconds after its first save; the exit code, negative when it was killed.

        `in_write`: and then on until a write is seen, for two seconds at most.
        """
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(f"{folder} {steps}\n")
        self.server.stdin.flush()
        child = int(self.server.stdout.readline())
        if kill_after is not None:
            time.sleep(kill_after)
            until = time.monotonic() + (2 if in_write else 0)
            while time.monotonic() < until and not writes(folder):
                time.sleep(0.0005)
            with contextlib.suppress(ProcessLookupError):  # a fast run has ended by itself
                os.kill(child, signal.SIGKILL)
        return int(self.server.stdout.readline())


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with Runs() as server:
        yield server


def writes(folder: Path) -> bool:
    """Whether a checkpoint in it is being written, or was when its process died."""
    return any(".tmp-" in path.name for path in folder.iterdir())


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("model.safetensors", "covey_state.safetensors")}


@pytest.mark.nightly
@pytest.mark.parametrize("steps", [5, 40])
def test_a_run_killed_at_random_moments_of_its_writes_always_resumes_and_ends_bit_for_bit(
    runs: Runs, tmp_path: Path, steps: int
) -> None:
    draw, killed, torn = random.Random(5), tmp_path / "killed", 0
    last = 0
    for attempt in range(2 * steps):
        if runs.train(killed, steps, kill_after=draw.uniform(0.0, 0.25), in_write=attempt % 2 == 1) == 0:
            break
        torn += writes(killed)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a kill must not even leave a damaged checkpoint behind
            newest = checkpoint.latest(killed)
        if newest is not None:
            assert checksums.problems(newest) == []
            assert checkpoint.load_state(newest)["state"]["step"] == checkpoint.step_of(newest)
            assert checkpoint.step_of(newest) >= last  # what was saved once is never lost
            last = checkpoint.step_of(newest)
    assert torn, "the kills missed the writes; the test shows nothing"
    assert runs.train(killed, steps) == 0
    assert runs.train(tmp_path / "whole", steps) == 0
    name = f"checkpoint-{steps}"
    assert content(killed / name) == content(tmp_path / "whole" / name)


def test_both_ways_of_saving_write_the_same_bytes(tmp_path: Path) -> None:
    for is_async in (True, False):
        trainer(tmp_path / str(is_async), max_steps=3, save_async=is_async).train()
    for step in (1, 2, 3):
        one, other = (tmp_path / str(is_async) / f"checkpoint-{step}" for is_async in (True, False))
        assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
        assert content(one) == content(other)


class Ballast(TrainerCallback):
    """Fills the disk at the start of a step and frees it at the start of another."""

    def __init__(self, disk: Path, fill_at: int, free_at: int) -> None:
        self.file, self.fill_at, self.free_at = disk / "ballast", fill_at, free_at

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.fill_at:
            with open(self.file, "wb", buffering=0) as file:
                while file_grows(file):
                    pass
        if state.global_step + 1 == self.free_at:
            self.file.unlink()


def file_grows(file: Any) -> bool:
    try:
        return bool(file.write(b"x" * 1024))
    except OSError:
        return False


def test_a_full_disk_is_told_at_the_next_step_and_training_goes_on(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = small_disk / "run"
    ballast = Ballast(small_disk, fill_at=3, free_at=6)
    one = trainer(run, model=tiny_model("qwen2", hidden=8), max_steps=6, save_total_limit=1, callbacks=[ballast])
    with caplog.at_level(logging.ERROR, logger="covey.training.saving"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the logs tell of the full disk too
        one.train()
    told = [record.message for record in caplog.records if record.name == "covey.training.saving"]
    assert {"checkpoint-3", "checkpoint-4"} <= {said.split()[0] for said in told}  # 2 and 5 meet the disk as it changes
    assert all("no space is left on the disk" in said and "the next save tries again" in said for said in told)
    assert [path.name for path in checkpoint.checkpoints(run)] == ["checkpoint-6"]
    assert checksums.problems(run / "checkpoint-6") == []


def test_the_third_save_that_fails_in_a_row_is_an_alert_and_the_limit_ends_the_run_with_74(small_disk: Path) -> None:
    run = small_disk / "run"
    ballast = Ballast(small_disk, fill_at=3, free_at=100)
    options = {"max_steps": 20, "save_error_limit": 5, "save_async": False, "callbacks": [ballast]}
    one = trainer(run, model=tiny_model("qwen2", hidden=8), **options)
    heard: list[Any] = []

    class Listen(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            monitor = one._parts.session.monitor
            monitor.outlets = [*monitor.outlets, heard.append]  # the disk is too full for alerts.jsonl

    one.add_callback(Listen())
    warnings.simplefilter("ignore")  # the logs tell of the full disk too; pytest puts the filters back
    with pytest.raises(StorageError, match=r"5 saves in a row failed .*checkpoint-7") as raised:
        one.train()
    assert raised.value.exit_code == 74
    assert [(alert.rule, alert.severity, alert.step) for alert in heard if alert.rule == "saves_failing"] == [
        ("saves_failing", "error", 5)
    ]
    assert [path.name for path in checkpoint.checkpoints(run)] == ["checkpoint-1", "checkpoint-2"]
    assert all(checksums.problems(path) == [] for path in checkpoint.checkpoints(run))


class Look(TrainerCallback):
    """Reads the checkpoint it is told of."""

    def __init__(self) -> None:
        self.found: list[list[str]] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.append(checksums.problems(Path(args.output_dir) / f"checkpoint-{state.global_step}"))


def test_a_callback_that_is_told_of_a_save_finds_it_whole(tmp_path: Path) -> None:
    look = Look()
    trainer(tmp_path, max_steps=2, callbacks=[look]).train()
    assert look.found == [[], []]


class Stop(TrainerCallback):
    """SIGTERM right after the first save has begun."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_stop_signal_waits_for_the_write(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # of its own process, were the run not to catch it
    try:
        one = trainer(tmp_path, save_steps=1, callbacks=[Stop()])
        stopped(one)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert one.exit_code == 75
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-1"]  # step 2 was given up
    assert checksums.problems(tmp_path / "checkpoint-1") == []
    assert json.loads((tmp_path / "run.json").read_text())["state"] == "stopped"
    assert not [path for path in tmp_path.iterdir() if ".tmp-" in path.name]


def test_where_memory_is_too_short_for_a_copy_the_save_waits_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covey.training.saving.free_memory", lambda: 1000)
    with caplog.at_level(logging.WARNING, logger="covey.training.saving"):
        trainer(tmp_path, max_steps=2).train()
    told = [record.message for record in caplog.records if record.name == "covey.training.saving"]
    assert len(told) == 1
    assert "so this save waits for the disk" in told[0]
    assert len(checkpoint.checkpoints(tmp_path)) == 2
