"""Agents from the command line and from YAML, and the examples."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from covey.cli import main

AGENT = """
def main(row, client, model):
    said = client.chat.completions.create(model=model, messages=row["prompt"], max_tokens=4).choices[0].message
    return float(len(said.content))
"""
EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"


@pytest.mark.slow
def test_the_command_line_and_yaml_train_an_agent_without_another_reward(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(AGENT)
    common = {
        "model": "demo",
        "dataset": "demo",
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
    }
    common |= {"max_completion_length": 16, "report_to": "none", "use_cpu": True}
    words = [word for name, value in common.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["train", *words, "--agent", "agent.py:main", "--output-dir", "a"]) == 0
    Path("run.yaml").write_text(json.dumps({**common, "agent": "agent.py:main", "output_dir": "b"}))
    assert main(["train", "--config", "run.yaml"]) == 0
    for run in ("a", "b"):
        first = json.loads((tmp_path / run / "metrics.jsonl").read_text().splitlines()[0])
        assert first["agents/calls"] == 1.0
        assert "rewards/main/mean" in first
        assert (tmp_path / run / "traces" / "step-000001.jsonl").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["calculator", "game"])
def test_the_examples_run(tmp_path, name):
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), str(tmp_path), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("95%") >= 2


@pytest.mark.nightly
def test_a_game_that_hangs_is_killed_or_writes_no_json_loses_its_own_episodes(tmp_path):
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / "game.py"), str(tmp_path), "--smoke", "--faults"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    events = [json.loads(line) for line in (tmp_path / "gigpo-0" / "events.jsonl").read_text().splitlines()]
    lost = [one for one in events if one["kind"] == "agent_failed"]
    assert 0 < len(lost) < 32
    assert f", {len(lost)} for {len(lost)} faults met" in done.stdout
    known = ("did not answer", "Expecting value", "Broken pipe")
    assert all(any(word in one["said"] for word in known) for one in lost)
