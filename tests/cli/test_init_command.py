"""`covey init`: a project whose own tests pass, whose run trains, and which never overwrites."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from covey.cli import main


@pytest.mark.nightly
def test_the_projects_own_tests_pass_a_step_of_training_included(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / "my project")]) == 0
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        words, cwd=tmp_path / "my project", capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


@pytest.mark.slow
def test_a_reward_that_is_broken_fails_them(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / "p")]) == 0
    reward = tmp_path / "p" / "reward.py"
    reward.write_text(reward.read_text().replace("== right", "is not None"))
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "reward_pays"]
    done = subprocess.run(words, cwd=tmp_path / "p", capture_output=True, text=True)
    assert done.returncode == 1
    assert "1 failed" in done.stdout


def test_a_model_of_ones_own_gets_a_rate_that_suits_it(tmp_path: Path, capsys) -> None:
    assert main(["init", str(tmp_path / "p"), "--model", "Qwen/Qwen2.5-0.5B-Instruct", "--json"]) == 0
    assert "run.yaml" in json.loads(capsys.readouterr().out)["files"]
    options = yaml.safe_load((tmp_path / "p" / "run.yaml").read_text())
    assert options["model"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert options["learning_rate"] == pytest.approx(1e-6)


def test_what_is_there_is_left_as_it_is(tmp_path: Path, capsys) -> None:
    (tmp_path / "reward.py").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert "is there already and not empty" in capsys.readouterr().err
    assert (tmp_path / "reward.py").read_text() == "mine"
    assert main(["init"]) == 2
    assert "needs a folder" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path, capsys) -> None:
    (tmp_path / "qwen").mkdir()
    assert main(["init", str(tmp_path / "p"), "--model", str(tmp_path / "qwne")]) == 2
    assert "qwne' does not exist. Did you mean qwen?" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


def test_a_models_folder_is_found_from_the_projects_folder(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "qwen").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["init", "p", "--model", "./qwen"]) == 0
    assert yaml.safe_load((tmp_path / "p" / "run.yaml").read_text())["model"] == str(tmp_path / "qwen")
