"""A checkpoint is whole or absent; a damaged one is found by name and the one before is used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from covey.errors import CheckpointError, StorageError
from covey.runs import checkpoint, checksums


def write_model(folder: Path) -> None:
    save_file({"weight": torch.arange(100.0)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    (folder / "nested").mkdir()
    (folder / "nested" / "template.jinja").write_text("{{ messages }}")
    (folder / "empty.txt").touch()


def saved(run: Path, step: int, **options: object) -> Path:
    return checkpoint.save(run, step, write_model, {"step": step, "x": torch.full((3,), float(step))}, **options)  # type: ignore[arg-type]


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


FILES = [
    "manifest.json",
    "covey_state.json",
    "covey_state.safetensors",
    "model.safetensors",
    "config.json",
    "nested/template.jinja",
]


def test_a_save_is_found_and_read_back(tmp_path: Path) -> None:
    run = tmp_path / "new" / "run"
    path = saved(run, 10)
    assert path == run / "checkpoint-10" == checkpoint.latest(run)
    state = checkpoint.load_state(path)
    assert state["step"] == 10
    assert torch.equal(state["x"], torch.full((3,), 10.0))
    assert names(run) == ["checkpoint-10"]
    assert sorted(checksums.read(path)["files"]) == sorted([*FILES[1:], "empty.txt"])


def test_the_newest_step_is_the_latest_whatever_the_clock_says(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        saved(tmp_path, step)
    os.utime(tmp_path / "checkpoint-9", (2e9, 2e9))
    assert [checkpoint.step_of(path) for path in checkpoint.checkpoints(tmp_path)] == [9, 10, 100]
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-100"


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def swap(path: Path) -> None:
    """The same file of the checkpoint before."""
    shutil.copy(str(path).replace("checkpoint-2", "checkpoint-1"), path)


def link(path: Path) -> None:
    target = path.parents[1] / f"elsewhere-{path.name}"
    path.rename(target)
    path.symlink_to(target)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: list[Callable[[Path], None]] = [truncate, flip, grow, Path.unlink, link, pipe]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(
    damage: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    saved(tmp_path, 1)
    path = saved(tmp_path, 2)
    damage(path / name)
    with pytest.warns(UserWarning, match=f"checkpoint-2 is damaged: .*{name}"):
        assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-1"  # who only reads renames nothing
    assert path.is_dir()
    with pytest.warns(UserWarning, match=f"checkpoint-2 is damaged: .*{name}.*now checkpoint-2.corrupt"):
        assert checkpoint.resolve("auto", tmp_path) == tmp_path / "checkpoint-1"
    assert (tmp_path / "checkpoint-2.corrupt").is_dir()
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-1"  # and quietly from now on


@pytest.mark.parametrize("name", ["covey_state.safetensors", "covey_state.json", "manifest.json"])
def test_a_file_of_another_checkpoint_is_detected(name: str, tmp_path: Path) -> None:
    saved(tmp_path, 1)
    swap(saved(tmp_path, 2) / name)
    with pytest.warns(UserWarning, match="checkpoint-2 is damaged"):
        assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-1"


def test_every_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    path = saved(tmp_path, 1) / "manifest.json"
    good = path.read_bytes()
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << (place % 8)
        path.write_bytes(bad)
        with pytest.raises(CheckpointError):
            checksums.read(path.parent)
    path.write_bytes(good)
    assert checksums.problems(path.parent) == []


def test_a_checkpoint_under_another_number_is_detected(tmp_path: Path) -> None:
    saved(tmp_path, 1).rename(tmp_path / "checkpoint-7")
    assert checksums.problems(tmp_path / "checkpoint-7") == ["manifest.json is of step 1, not 7"]


def test_when_all_are_damaged_training_never_starts_again_from_zero(tmp_path: Path) -> None:
    for step in (1, 2):
        truncate(saved(tmp_path, step) / "model.safetensors")
    with (
        pytest.warns(UserWarning, match="is damaged"),
        pytest.raises(CheckpointError, match="Every checkpoint") as caught,
    ):
        checkpoint.resolve("auto", tmp_path)
    assert caught.value.exit_code == 4
    with pytest.raises(CheckpointError, match="Every checkpoint"):  # now that only the folders set aside are left
        checkpoint.resolve("auto", tmp_path)


@pytest.mark.parametrize(
    "is_resumed, advice", [(True, "start again with resume 'never'"), (False, "name other weights")]
)
def test_a_damaged_only_checkpoint_is_told_by_what_its_reader_can_do(
    is_resumed: bool, advice: str, tmp_path: Path
) -> None:
    truncate(saved(tmp_path, 1) / "model.safetensors")
    with pytest.warns(UserWarning, match="is damaged") as told, pytest.raises(CheckpointError) as caught:
        checkpoint.latest(tmp_path, is_resumed=is_resumed)
    assert "The one before" not in str(told[0].message)  # there is none
    assert str(caught.value).endswith(f"restore one from a copy, or {advice}.")


def test_weights_of_another_program_are_named_as_weights_to_who_resumes_nothing(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-5").mkdir()
    write_model(tmp_path / "checkpoint-5")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.latest(tmp_path, is_resumed=False)
    expected = f"which Covey did not write; name the one that you mean, such as {tmp_path / 'checkpoint-5'}."
    assert str(caught.value).endswith(expected)


def test_a_checkpoint_that_its_run_prunes_while_it_is_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)

    def problems(path: Path) -> list[str]:
        if path.name == "checkpoint-1":
            saved(tmp_path, 2, keep=1)
        return checksums.problems(path)

    monkeypatch.setattr(checkpoint, "problems", problems)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-2"


def test_files_added_later_and_copies_elsewhere_do_not_disturb(tmp_path: Path) -> None:
    path = saved(tmp_path / "a", 3)
    (path / "README.md").write_text("card")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert checkpoint.latest(tmp_path / "b") == tmp_path / "b" / "checkpoint-3"


def test_resume_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    assert checkpoint.resolve("auto", run) is None
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*run to resume from"):
        checkpoint.resolve(True, run)
    first, second = saved(run, 1), saved(run, 2)
    assert checkpoint.resolve("auto", run) == checkpoint.resolve(True, run) == second
    assert checkpoint.resolve("never", run) is checkpoint.resolve(False, run) is checkpoint.resolve(None, run) is None
    assert checkpoint.resolve(str(first), tmp_path / "other") == first
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checkpoint.resolve(f"~/{first.relative_to(tmp_path)}", run) == first
    assert checkpoint.resolve(run, tmp_path / "other") == second
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        checkpoint.resolve(tmp_path / "nowhere", run)
    flip(second / "config.json")
    with pytest.raises(CheckpointError, match=r"checkpoint-2 is damaged: config.json has changed"):
        checkpoint.resolve(second, run)
    assert second.is_dir()  # a checkpoint named by the user is left where it is


def test_a_folder_that_covey_did_not_write_is_a_model_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-5").mkdir()
    write_model(tmp_path / "checkpoint-5")
    with pytest.raises(CheckpointError, match=r"checkpoint-5, which Covey did not write.*model="):
        checkpoint.resolve("auto", tmp_path)
    with pytest.raises(CheckpointError, match="give it as the model instead"):
        checkpoint.resolve(tmp_path / "checkpoint-5", tmp_path)
    saved(tmp_path, 4)
    with pytest.warns(UserWarning, match="checkpoint-5 .*resuming from checkpoint-4"):
        assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-4"
    with pytest.warns(UserWarning, match=r"kept with \.foreign"):
        saved(tmp_path, 5)
    assert any(name.startswith("checkpoint-5.foreign-") for name in names(tmp_path))


def test_the_same_step_saved_twice_is_the_second(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    path = checkpoint.save(tmp_path, 1, write_model, "second")
    assert checkpoint.load_state(path) == "second"
    assert names(tmp_path) == ["checkpoint-1"]


def test_a_crash_in_mid_swap_brings_the_old_one_back(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    path.rename(tmp_path / f"checkpoint-1.old-{os.getpid()}-0123abcd")
    assert checkpoint.resolve("auto", tmp_path) == path


@pytest.mark.parametrize(
    "keep, best, left",
    [
        (None, None, [1, 2, 3, 4]),
        (0, None, [1, 2, 3, 4]),
        (1, None, [4]),
        (2, None, [3, 4]),
        (1, "checkpoint-2", [2, 4]),
        (2, "runs/x/checkpoint-1", [1, 4]),
        (3, "checkpoint-1", [1, 3, 4]),
        (2, "checkpoint-4", [3, 4]),
    ],
)
def test_save_total_limit_keeps_the_newest_and_the_best(
    keep: int | None, best: str | None, left: list[int], tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        saved(tmp_path, step)
    saved(tmp_path, 4, keep=keep, best=best)
    assert [checkpoint.step_of(path) for path in checkpoint.checkpoints(tmp_path)] == left
    assert len(names(tmp_path)) == len(left)


def test_pruning_never_deletes_the_only_one_that_verifies(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saved(tmp_path, step)
    truncate(tmp_path / "checkpoint-3" / "model.safetensors")
    assert checkpoint.prune(tmp_path, 1) == [tmp_path / "checkpoint-1"]
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    truncate(tmp_path / "checkpoint-2" / "model.safetensors")
    assert checkpoint.prune(tmp_path, 1) == []


def test_pruning_leaves_what_covey_did_not_write(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "notes.txt").touch()
    saved(tmp_path, 2)
    saved(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-3"]


def test_leftovers_of_dead_processes_are_cleared_and_of_living_ones_kept(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    alive = subprocess.Popen(["sleep", "60"])
    try:
        for name in (
            f"checkpoint-1.tmp-{dead.pid}-00000000",
            f"checkpoint-2.tmp-{alive.pid}-00000000",
            "notes.tmp-1-0",
        ):
            (tmp_path / name).mkdir()
        assert checkpoint.latest(tmp_path) is None
        assert len(names(tmp_path)) == 3  # who only reads clears nothing away
        assert checkpoint.resolve("auto", tmp_path) is None
        assert names(tmp_path) == [f"checkpoint-2.tmp-{alive.pid}-00000000", "notes.tmp-1-0"]
    finally:
        alive.kill()
        alive.wait()


def test_a_writer_that_fails_leaves_nothing_and_its_own_error(tmp_path: Path) -> None:
    saved(tmp_path, 1)

    def fail(folder: Path) -> None:
        write_model(folder)
        raise ValueError("a tokenizer that cannot be saved")

    with pytest.raises(ValueError, match="cannot be saved"):
        checkpoint.save(tmp_path, 2, fail, {})
    assert names(tmp_path) == ["checkpoint-1"]


def test_a_run_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"checkpoint-1 could not be written to /sys/covey: writing there"):
        saved(Path("/sys/covey"), 1)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a\0b"])
def test_a_manifest_never_makes_us_read_outside_the_checkpoint(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    manifest = checksums.read(path)
    manifest["files"][name] = {"size": 1, "xxh3_128": "0"}
    manifest["xxh3_128_of_this_file"] = checksums._UNSET
    content = checksums.json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(
        content.replace(checksums._UNSET.encode(), checksums._digest(content).encode())
    )
    assert "outside the checkpoint" in checksums.problems(path)[0]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "[" * 100_000, '{"format": "covey-checkpoint"}', "\xff"])
def test_a_manifest_of_another_kind_is_a_problem_not_a_crash(content: str, tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    (path / "manifest.json").write_bytes(content.encode("latin-1"))
    assert len(checksums.problems(path)) == 1


def test_pickles_in_a_checkpoint_are_never_opened(tmp_path: Path) -> None:
    import pickle

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path}/canary",)

    path = saved(tmp_path, 1)
    for name in ("optimizer.pt", "rng_state.pth", "covey_state.pkl", "covey_state.pt", "training_args.bin"):
        (path / name).write_bytes(pickle.dumps(Bomb()))
    for name in ("covey_state.json", "covey_state.safetensors"):
        checkpoint.load_state(checkpoint.resolve("auto", tmp_path) or path)
        good = (path / name).read_bytes()
        (path / name).write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(CheckpointError):
            checkpoint.load_state(path)
        (path / name).write_bytes(good)
    assert not (tmp_path / "canary").exists()
