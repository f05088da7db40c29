"""A disk that is full, out of inodes or read-only, and stays so: exit code 74, and one sentence that says what was kept and where."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from mounting import can_mount
from safetensors import SafetensorError
from small_runs import trainer
from transformers import TrainerCallback

from covey.cli import main
from covey.errors import CoveyError, StorageError
from covey.rollout.vllm.weights import Source, write_adapter, write_weights
from covey.runs import checkpoint, checksums
from covey.runs.disk import as_disk_errors, describe_newest, write_whole
from kit import rest_nightly, tiny_model


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with these options and gives its folder."""
    if not can_mount():
        pytest.skip("mount is not permitted here")
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> Path:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)
        return folder

    yield mount
    while subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True).returncode == 0:
        pass


def fill(disk: Path) -> None:
    with open(disk / "ballast", "ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


def use_up_names(disk: Path) -> None:
    (disk / "names").mkdir()
    with contextlib.suppress(OSError):
        for number in range(10_000):
            (disk / "names" / str(number)).touch()


def make_read_only(disk: Path) -> None:
    """A second mount over the first: one that has a file open for writing cannot be made read-only from outside."""
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)


TROUBLES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "full": (fill, "size=12m", "no space is left on the disk"),
    "without inodes": (use_up_names, "size=64m,nr_inodes=150", "no space is left on the disk"),
    "read-only": (make_read_only, "size=64m", "the disk is read-only"),
}


class Trouble(TrainerCallback):
    """Makes the disk refuse from the start of a step on."""

    def __init__(self, step: int, disk: Path, make: Callable[[Path], None]) -> None:
        self.step, self.disk, self.make = step, disk, make

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.make(self.disk)


@pytest.mark.parametrize("trouble", rest_nightly(TROUBLES, 1))
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_the_disk_does_not_take_is_a_storage_error_that_says_what_was_kept(
    trouble: str, mounted: Callable[[str], Path]
) -> None:
    make, options, reason = TROUBLES[trouble]
    disk = mounted(options)
    run = disk / "run"
    more: dict[str, Any] = {"save_steps": 2, "save_async": False, "rollout_log_steps": 1, "logging_steps": 1}
    one = trainer(run, max_steps=5, callbacks=[Trouble(2, disk, make)], **more)
    one.train()  # records and checkpoints that are refused are told, and training goes on
    assert one.state.global_step == 5
    with pytest.raises(StorageError, match=f"The trained model could not be written to .*final.*: {reason}") as caught:
        one.save_model(str(run / "final"))
    assert caught.value.exit_code == 74
    assert f"checkpoint-2 is whole, in {run}" in str(caught.value)
    assert not list(run.glob("final/*")), "no half of a model"
    assert [path.name for path in checkpoint.checkpoints(run) if not checksums.problems(path)] == ["checkpoint-2"]
    with pytest.raises(StorageError):
        one.save_state()


@pytest.mark.parametrize("trouble", rest_nightly(TROUBLES, 1))
@pytest.mark.filterwarnings("ignore")
def test_the_command_line_ends_with_74_where_the_disk_takes_no_model(
    trouble: str, mounted: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from covey.training.trainer import GRPOTrainer

    make, options, reason = TROUBLES[trouble]
    disk = mounted(options.replace("12m", "120m"))
    real = GRPOTrainer.steps

    def steps(self: Any, **given: Any) -> Any:
        self.add_callback(Trouble(1, disk, make))
        return real(self, **given)

    monkeypatch.setattr(GRPOTrainer, "steps", steps)
    words = [
        "train",
        "demo",
        "--output-dir",
        str(disk / "run"),
        "--max-steps",
        "2",
        "--save-steps",
        "1",
        "--report-to",
        "none",
    ]
    words += ["--per-device-train-batch-size", "8", "--max-completion-length", "4", "--eval-dataset", "demo"]
    words += ["--save-async", "false"]
    assert main([*words, "--max-eval-prompts", "2", "--eval-strategy", "steps", "--eval-steps", "2"]) == 74
    said = capsys.readouterr().err
    assert "bug in Covey" not in said
    (error,) = [line for line in said.splitlines() if line.startswith("error:") and "The trained model" in line]
    assert reason in error
    assert f"checkpoint-1 is whole, in {disk / 'run'}" in error


@pytest.mark.filterwarnings("ignore")
def test_a_stop_whose_checkpoint_the_disk_does_not_take_is_not_told_as_saved(mounted: Callable[[str], Path]) -> None:
    import signal

    disk = mounted("size=12m")

    class Stop(Trouble):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_step_begin(args, state, control)
            if state.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    one = trainer(disk / "run", max_steps=6, save_steps=2, save_async=False, callbacks=[Stop(3, disk, fill)])
    with pytest.raises(
        StorageError, match=r"Stopped by SIGTERM, but step 3 could not be saved .*checkpoint-2 is whole"
    ):
        one.train()


@pytest.mark.parametrize("trouble", ["full", "without inodes", "read-only"])
@pytest.mark.filterwarnings("ignore")
def test_a_run_cannot_begin_on_such_a_disk_and_says_so(trouble: str, mounted: Callable[[str], Path]) -> None:
    make, options, reason = TROUBLES[trouble]
    disk = mounted(options)
    (disk / "run").mkdir()
    make(disk)
    with pytest.raises(CoveyError, match=f"{reason}|cannot be written") as caught:
        trainer(disk / "run", max_steps=1).train()
    assert caught.value.exit_code in (2, 74)


REFUSED = {
    errno.ENOSPC: "no space is left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the disk is read-only",
    errno.EIO: "the disk reports an input/output error",
}


@pytest.mark.parametrize("number", REFUSED)
@pytest.mark.parametrize("kind", ["OSError", "SafetensorError", "tokenizers", "a cause"])
def test_every_library_s_own_error_of_the_disk_is_understood(number: int, kind: str, tmp_path: Path) -> None:
    words = f"{os.strerror(number)} (os error {number})"

    def fail() -> None:
        if kind == "OSError":
            raise OSError(number, os.strerror(number), "x.bin")
        if kind == "SafetensorError":
            raise SafetensorError(f"Error while serializing: I/O error: {words}")
        if kind == "tokenizers":
            raise Exception(words)
        raise RuntimeError("it failed") from OSError(number, os.strerror(number))

    with (
        pytest.raises(StorageError, match=f"{REFUSED[number]}.*No checkpoint of this run is in .* and start again"),
        as_disk_errors("The model", tmp_path / "final", tmp_path),
    ):
        fail()


def test_an_error_that_is_not_the_disk_s_stays_what_it_is(tmp_path: Path) -> None:
    for error in (KeyError("x"), OSError(errno.ENOENT, "none"), StorageError("mine")):
        with pytest.raises(type(error)) as caught, as_disk_errors("The model", tmp_path, tmp_path):
            raise error
        assert caught.value is error


def test_what_is_kept_is_the_newest_checkpoint_that_verifies(tmp_path: Path) -> None:
    assert describe_newest(tmp_path) == f"No checkpoint of this run is in {tmp_path}."
    for step in (1, 2):
        checkpoint.save(tmp_path, step, lambda folder: (folder / "a").write_text("a"), {})
    assert describe_newest(tmp_path) == f"checkpoint-2 is whole, in {tmp_path}."
    (tmp_path / "checkpoint-2" / "a").write_text("b")
    assert describe_newest(tmp_path) == f"checkpoint-1 is whole, in {tmp_path}."


def test_a_model_that_is_written_whole_replaces_its_own_files_only(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "a").write_text("old")

    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "a").write_text("new")
        (folder / "sub").mkdir()
        (folder / "sub" / "b").write_text("new")

    def fail(folder: Path) -> None:
        write(folder)
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        write_whole(tmp_path, fail)
    assert (tmp_path / "a").read_text() == "old"
    write_whole(tmp_path, write)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "notes", "sub"]
    assert ((tmp_path / "a").read_text(), (tmp_path / "sub" / "b").read_text()) == ("new", "new")
    with pytest.raises(OSError, match="full"):
        write_whole(tmp_path / "new", fail)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("is_adapter", [False, True], ids=["whole weights", "an adapter"])
def test_weights_for_a_vllm_server_name_the_disk_that_they_fill(
    is_adapter: bool, small_disk: Path, tmp_path: Path
) -> None:
    """It may be another than the run's."""
    model: Any = tiny_model("qwen2", hidden=128, layers=2)
    if is_adapter:
        model = peft.get_peft_model(model, peft.LoraConfig(r=128, target_modules=["q_proj", "v_proj", "down_proj"]))
    folder = small_disk / "versions" / "0"
    run_dir = tmp_path / "run"
    expected = pytest.raises(StorageError, match=f"written to {folder}: no space is left on the disk")
    with expected, as_disk_errors("A file of the run", run_dir, run_dir):
        if is_adapter:
            write_adapter(Source(model), folder)
        else:
            write_weights(Source(model), folder, torch.float32)


@pytest.mark.parametrize("error", [OSError(28, "No space left"), ConnectionError("gone"), SafetensorError("full")])
def test_an_error_while_weights_are_written_keeps_its_kind_and_words(
    error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise error

    words, model = str(error), tiny_model("qwen2")
    monkeypatch.setattr(type(model.config), "save_pretrained", fail)
    with pytest.raises(type(error)) as caught:
        write_weights(Source(model), tmp_path / "0", torch.float32)
    assert caught.value is error
    names_it = getattr(error, "errno", True) is not None
    assert error.filename == (str(tmp_path / "0") if names_it else None)
    assert str(error) in (words, f"{words}: {str(tmp_path / '0')!r}")
