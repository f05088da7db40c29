"""`covey checkpoints`: what is there, what is damaged, old ones deleted, and damaged ones mended byte by byte or set aside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from covey.cli import main
from covey.errors import CheckpointError
from covey.runs import checkpoint, checksums
from covey.runs.weights import model_folder

BEST = "checkpoint-10"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three checkpoints that share their configuration and differ in weights; the first had the best evaluation."""

    def write(folder: Path, step: int) -> None:
        save_file({"weight": torch.full((50,), float(step))}, folder / "model.safetensors")
        (folder / "config.json").write_text('{"model_type": "tiny"}')
        (folder / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": f"somewhere/{BEST}"}))

    for step in (10, 20, 30):
        checkpoint.save(tmp_path / "run", step, lambda folder, step=step: write(folder, step), {"step": step})
    return tmp_path / "run"


def said(capsys, *words: object, code: int = 0) -> dict:
    capsys.readouterr()
    assert main(["checkpoints", *map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("checkpoint-*"))


def test_the_list_tells_size_kind_and_the_best(run: Path, capsys) -> None:
    (run / "checkpoint-20" / "covey_state.json").unlink()
    checksums.seal(run / "checkpoint-20", 20)  # as one with save_only_model
    found = said(capsys, "list", run)["checkpoints"]
    assert [(one["step"], one["kind"], one["best"]) for one in found] == [
        (10, "resumable", True),
        (20, "weights only", False),
        (30, "resumable", False),
    ]
    assert all(one["bytes"] > 200 and one["saved"] > 1.6e9 for one in found)
    assert main(["checkpoints", "list", str(run)]) == 0
    assert "best evaluation" in capsys.readouterr().out


def test_the_best_is_what_the_newest_state_that_can_be_read_says(run: Path, capsys) -> None:
    (run / "checkpoint-20" / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": None}))
    (run / "checkpoint-30" / "trainer_state.json").write_text("{")
    assert not any(one["best"] for one in said(capsys, "list", run)["checkpoints"])


def test_the_list_calls_a_torn_checkpoint_damaged_without_reading_its_bytes(run: Path, capsys) -> None:
    torn = run / "checkpoint-20" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:100])
    (run / "checkpoint-30" / "manifest.json").unlink()
    kinds = [one["kind"] for one in said(capsys, "list", run)["checkpoints"]]
    assert kinds == ["resumable", "damaged", "damaged"]


def test_a_checkpoint_with_changed_weights_is_no_model(run: Path, tmp_path: Path) -> None:
    good, changed, half = (run / f"checkpoint-{step}" for step in (10, 20, 30))
    (good / "config.json").write_text('{"model_type": "edited by its owner"}')
    weights = changed / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x07")
    (half / "manifest.json").write_text("{")
    assert model_folder(str(good)) == str(good)
    with pytest.raises(
        CheckpointError, match=r"model.safetensors has changed since it was written. covey checkpoints verify RUN"
    ):
        model_folder(str(changed))
    with pytest.raises(CheckpointError, match=r"is no whole checkpoint: manifest.json is damaged"):
        model_folder(str(half))
    (tmp_path / "theirs").mkdir()
    for name in ("config.json", "manifest.json"):
        (tmp_path / "theirs" / name).write_text("{}")  # a manifest of another program
    assert model_folder(str(tmp_path / "theirs")) == str(tmp_path / "theirs")


def test_one_changed_byte_is_found_and_named(run: Path, capsys) -> None:
    assert said(capsys, "verify", run)["ok"] is True
    weights = run / "checkpoint-20" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x07")
    found = said(capsys, "verify", run, code=4)["checkpoints"]
    assert found[str(run / "checkpoint-20")] == ["model.safetensors has changed since it was written"]
    assert said(capsys, "verify", run / "checkpoint-30")["ok"] is True
    assert names(run) == ["checkpoint-10", "checkpoint-20", "checkpoint-30"], "verifying changes nothing"


def test_pruning_keeps_the_best_and_the_newest(run: Path, capsys) -> None:
    planned = said(capsys, "prune", run, "--keep", 1, "--dry-run")
    assert names(run) == ["checkpoint-10", "checkpoint-20", "checkpoint-30"]
    done = said(capsys, "prune", run, "--keep", 1)
    assert planned["excess"] == done["deleted"] == [str(run / "checkpoint-20")]
    assert names(run) == ["checkpoint-10", "checkpoint-30"]


def test_nothing_is_pruned_where_nothing_is_whole(run: Path, capsys) -> None:
    for path in checkpoint.checkpoints(run):
        (path / "model.safetensors").write_bytes(b"")
    assert main(["checkpoints", "prune", str(run), "--keep", "1"]) == 4
    assert "none is deleted" in capsys.readouterr().err
    assert len(names(run)) == 3


def test_a_damaged_file_comes_from_a_checkpoint_that_holds_the_same_bytes(run: Path, capsys) -> None:
    (run / "checkpoint-30" / "config.json").write_text("{}")
    (run / "checkpoint-20" / "config.json").unlink()
    done = said(capsys, "repair", run)
    assert done["copied"] == [
        "checkpoint-20/config.json from checkpoint-10",
        "checkpoint-30/config.json from checkpoint-10",
    ]
    assert done["resumes_from"] == str(run / "checkpoint-30")
    assert not any(checksums.problems(path) for path in checkpoint.checkpoints(run))


def test_what_no_copy_can_mend_is_set_aside_and_comes_back_when_restored(run: Path, capsys) -> None:
    weights = run / "checkpoint-30" / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1])
    (run / "checkpoint-20.tmp-999999-0123abcd").mkdir()
    done = said(capsys, "repair", run)
    assert done["resumes_from"] == str(run / "checkpoint-20")
    assert names(run) == ["checkpoint-10", "checkpoint-20", "checkpoint-30.corrupt"]
    assert "model.safetensors" in done["damaged"][0]
    (run / "checkpoint-30.corrupt" / "model.safetensors").write_bytes(good)
    again = said(capsys, "repair", run)
    assert again["renamed"] == ["checkpoint-30.corrupt is checkpoint-30 again"]
    assert again["resumes_from"] == str(run / "checkpoint-30")


def test_a_run_that_trains_is_left_alone(run: Path, capsys) -> None:
    code = "import sys; from pathlib import Path; from covey.runs.lock import FolderLock; FolderLock(Path(sys.argv[1])).take(); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        holder.stdout.readline()
        assert main(["checkpoints", "prune", str(run), "--keep", "1"]) == 2
        assert "is in use" in capsys.readouterr().err
        holder.stdin.close()
    assert len(names(run)) == 3


def test_wrong_words_are_answered_in_a_sentence(run: Path, capsys) -> None:
    for words, expected in (
        (["lst", str(run)], "Did you mean list?"),
        (["list"], "needs the folder of a run"),
        (["prune", str(run)], "needs --keep N"),
        (["list", str(run), "--keep", "2"], "belong to covey checkpoints prune"),
        (["verify", str(run / "nowhere")], "is no folder"),
    ):
        assert main(["checkpoints", *words]) == 2
        assert expected in capsys.readouterr().err
