"""A run writes inside its folder only: through no link, and into nothing that is no file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from covey.errors import RunFolderError
from covey.runs import RunFolder, evaluations, manifest
from covey.runs.metrics import JsonLines
from covey.types import Completion, Group, Prompt

GROUP = Group(
    prompt=Prompt(uid="0:1", token_ids=(1,), text="2 + 2 ="),
    completions=(Completion(token_ids=torch.tensor([1, 2]), text="four", finish="stop"),),
    rewards=torch.tensor([[1.0]]),
)


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    (folder / "inner").mkdir(parents=True)
    (folder / "file").write_text('{"step": 1, "mine": true}\nnot to be cut')
    return folder


FILES = [".lock", "metrics.jsonl", "events.jsonl", "alerts.jsonl", "evaluations.jsonl", "train.yaml", "run.json",
         "trainer_state.json", "config.json", "model.safetensors"]  # fmt: skip
FOLDERS = ["rollouts", "evaluations", "evaluations/eval", "bad_steps", "bad_steps/step-000001", "checkpoint-3", "model", "runs"]  # fmt: skip


def link_to_a_file(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "file")


def link_to_nothing_yet(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "new")


def hard_link(path: Path, outside: Path) -> None:
    os.link(outside / "file", path)


def pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, outside: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("plant", [link_to_a_file, link_to_nothing_yet, hard_link, pipe, folder])
@pytest.mark.parametrize("name", FILES)
def test_a_run_does_not_begin_where_a_file_of_its_is_none(
    name: str, plant: Callable[[Path, Path], None], tmp_path: Path, outside: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    plant(run / name, outside)
    before = snapshot(outside)
    with pytest.raises(RunFolderError, match=name.replace(".", r"\.")) as told:
        RunFolder.create(run)
    assert str(told.value).count("\n") == 0
    assert snapshot(outside) == before


@pytest.mark.parametrize("name", FOLDERS)
def test_a_run_does_not_begin_where_a_folder_of_its_is_a_link(name: str, tmp_path: Path, outside: Path) -> None:
    run = tmp_path / "run"
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(outside / "inner")
    with pytest.raises(RunFolderError, match="is a link"):
        RunFolder.create(run)
    assert snapshot(outside / "inner") == {}


@pytest.mark.parametrize("name", ["rollouts/step-000001.parquet", "model/config.json"])
def test_a_link_within_a_folder_of_a_run_is_refused_too(name: str, tmp_path: Path, outside: Path) -> None:
    run = tmp_path / "run"
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(outside / "file")
    with pytest.raises(RunFolderError, match="is a link"):
        RunFolder.create(run)


def write_everything(run: RunFolder) -> None:
    run.append_metrics(1, {"reward": 0.5})
    run.write_rollouts(1, [GROUP], ["right"])
    run.write_evaluation(1, "eval", {"eval_reward": 0.5}, evaluations.rows_of([GROUP], ["right"], [1.0]))
    run.write_bad_step(1, {"x": 1})
    run.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl", "rollouts", "evaluations", "bad_steps"])
def test_a_link_that_appears_while_a_run_writes_is_not_followed(name: str, tmp_path: Path, outside: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    run.describe(args={"seed": 0})
    (run.path / name).symlink_to(outside / ("file" if name.endswith("jsonl") else "inner"))
    before = snapshot(outside)
    write_everything(run)
    assert snapshot(outside) == before


def test_a_log_that_is_a_link_is_told_in_a_sentence_and_its_lines_wait(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to(outside / "file")
    before = snapshot(outside)
    log = JsonLines(tmp_path / "metrics.jsonl")
    with pytest.warns(UserWarning, match="is a link"):
        log.append({"step": 1})
    assert snapshot(outside) == before
    log.path.unlink()
    with pytest.warns(UserWarning, match="no line was lost"):
        log.append({"step": 2})
    assert log.path.read_text().count("\n") == 2


def test_a_folder_that_the_user_reaches_through_a_link_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    run = RunFolder.create(tmp_path / "run")
    run.describe(args={"seed": 0})
    write_everything(run)
    assert {"run.json", "metrics.jsonl", "rollouts"} <= {path.name for path in (tmp_path / "disk").iterdir()}


def test_a_link_of_another_name_is_left_alone(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").symlink_to(outside)
    run = RunFolder.create(tmp_path / "run")
    write_everything(run)
    assert (tmp_path / "run" / "latest").is_symlink()


@pytest.mark.parametrize("plant", [link_to_a_file, pipe, folder])
def test_a_manifest_that_is_no_file_is_none(plant: Callable[[Path, Path], None], tmp_path: Path, outside: Path) -> None:
    (outside / "file").write_text('{"format": "covey-run"}')
    plant(tmp_path / "run.json", outside)
    assert manifest.read(tmp_path / "run.json") is None


def test_a_manifest_that_is_nested_deeply_is_none(tmp_path: Path) -> None:
    for depth in (100, 100_000):
        nested = '{"format": "covey-run", "config": ' + '{"a": ' * depth + "1" + "}" * depth + "}"
        (tmp_path / "run.json").write_text(nested)
        assert manifest.read(tmp_path / "run.json") is None


def test_the_options_of_a_command_are_not_written_through_a_link(tmp_path: Path, outside: Path) -> None:
    from types import SimpleNamespace

    from covey.cli.rerun import RECIPE, recorder

    (tmp_path / RECIPE).symlink_to(outside / "file")
    before = snapshot(outside)
    recorder({"seed": 1}, {}).on_train_begin(
        SimpleNamespace(output_dir=str(tmp_path)), SimpleNamespace(is_world_process_zero=True), None
    )
    assert snapshot(outside) == before
    assert "seed: 1" in (tmp_path / RECIPE).read_text()
