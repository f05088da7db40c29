"""What lies in examples/ runs as it is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from covey.cli import main
from forked import run

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.nightly
def test_the_trl_script_trains(tmp_path: Path) -> None:
    done = run(EXAMPLES / "trl_script.py", "demo", "2", cwd=tmp_path)
    assert done.returncode == 0, done.err
    assert done.out.splitlines()[-1].startswith("reward: ")
    assert (tmp_path / "runs" / "trl-script" / "metrics.jsonl").is_file()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_rescue_example_learns_what_the_policy_alone_never_finds(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "ensemble_rescue.py"), "--seeds", "1"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    alone, rescued = ({"before": float(row[2]), "after": float(row[3])} for row in rows)
    assert alone == {"before": 0.0, "after": 0.0}
    assert rescued["before"] == 0.0
    assert rescued["after"] > 0.3


@pytest.mark.parametrize(
    "name", [pytest.param(path.name, marks=pytest.mark.nightly) for path in sorted(EXAMPLES.glob("*.yaml"))]
)
def test_every_configuration_is_whole(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the model and the data, which are on the hub, are replaced."""
    column = yaml.safe_load((EXAMPLES / name).read_text())["prompt_column"]
    data = tmp_path / "rows.jsonl"
    row = {column: "2 + 2 =", "answer": "#### 4", "test_list": ["assert f(1) == 1"]}
    data.write_text(f"{json.dumps(row)}\n" * 8)
    words = ["train", "--config", str(EXAMPLES / name), "--model", "demo", "--dataset", str(data), "--bf16", "false"]
    if name == "gsm8k.yaml":
        words += ["--eval-dataset", str(data)]
    assert main([*words, "--output-dir", str(tmp_path / "run"), "--max-completion-length", "64", "--dry-run"]) == 0, (
        capsys.readouterr().err
    )


@pytest.mark.nightly
def test_the_feedback_example_teaches_the_endpoint_to_be_short(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "live" / "feedback.py"), "--smoke"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    before, after = (float(line.split()[3]) for line in done.stdout.splitlines()[-2:])
    assert after < before


@pytest.mark.nightly
def test_the_image_example_runs_from_drawing_to_the_last_evaluation(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "images" / "train.py"), str(tmp_path), "--smoke"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("after:  ")
    assert any((tmp_path / "grpo" / "rollouts" / "images").iterdir())
