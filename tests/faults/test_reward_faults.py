"""Whole runs whose rewards fail: nothing is lost, nothing hangs, nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from covey.cli import main

HERE = Path(__file__).parent
DATA = HERE.parent / "data" / "gsm8k" / "train.jsonl"
REWARDS = HERE / "troubled_rewards.py"


def words(tmp_path, name, rewards, steps, *more):
    given = (
        f"train --model demo --dataset {DATA} --prompt-column question --output-dir {tmp_path / name} "
        f"--max-completion-length 8 --num-generations 4 --per-device-train-batch-size 8 --logging-steps 1 --save-steps 1 "
        f"--disable-tqdm --use-cpu --learning-rate 1e-3 --max-steps {steps} --on-long-prompt drop --lr-scheduler-type constant"
    ).split()
    for reward in rewards:
        given += ["--reward", f"{REWARDS}:{reward}" if reward != "format" else reward]
    return [*given, *map(str, more)]


def lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def workers():
    """Process ids of reward workers on this machine that this test started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            is_mine = f"COVEY_TEST={os.getpid()}".encode() in (entry / "environ").read_bytes()
            if is_mine and b"covey.rewards.calling.worker" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True)
def _marked(monkeypatch):
    monkeypatch.setenv("COVEY_TEST", str(os.getpid()))
    yield
    assert workers() == []


@pytest.mark.slow
def test_a_reward_that_raises_hangs_and_returns_rubbish_in_turn_costs_no_step_and_no_other_score(tmp_path, capsys):
    rewards = ["steady", "troubled", "stuck_in_c", "format"]
    assert main(words(tmp_path, "run", rewards, 6, "--reward-timeout-seconds", 2)) == 0
    capsys.readouterr()
    steps = lines(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    missing = [step.get("rewards/troubled/errors", 0) for step in steps]
    assert missing == [0, 8, 0, 8, 0, 8]
    assert [step.get("rewards/troubled/timeouts", 0) for step in steps] == [0, 0, 0, 8, 0, 0]
    assert [step.get("rewards/stuck_in_c/timeouts", 0) for step in steps] == [0, 8, 0, 0, 0, 0]
    assert all(step["rewards/steady/std"] >= 0 for step in steps)
    assert all(step["rewards/unscored"] == 0 for step in steps)
    told = (tmp_path / "run" / "alerts.jsonl").read_text() if (tmp_path / "run" / "alerts.jsonl").exists() else ""
    told += "".join(p.read_text() for p in (tmp_path / "run").glob("events*.jsonl"))
    assert "trouble at step 1" in told
    assert "in troubled" in told
    assert "in stuck_in_c" in told


@pytest.mark.slow
def test_a_troubled_run_that_is_interrupted_ends_with_the_weights_of_one_that_is_not(tmp_path, capsys):
    options = [
        "--reward-normalization",
        "running",
        "--reward-clip",
        "-3",
        "3",
        "--reward-weights",
        "linear:1:0:4",
        "0.5",
    ]
    rewards = ["steady", "troubled"]
    assert main(words(tmp_path, "whole", rewards, 4, *options, "--reward-timeout-seconds", 2)) == 0
    assert main(words(tmp_path, "parts", rewards, 2, *options, "--reward-timeout-seconds", 2)) == 0
    assert main(words(tmp_path, "parts", rewards, 4, *options, "--reward-timeout-seconds", 2, "--resume", "auto")) == 0
    capsys.readouterr()
    assert weights(tmp_path / "whole" / "checkpoint-4") == weights(tmp_path / "parts" / "checkpoint-4")
    whole, parts = lines(tmp_path / "whole"), lines(tmp_path / "parts")
    for name in ("rewards/steady/advantage_share", "rewards/steady/weight", "reward", "loss"):
        assert [step.get(name) for step in whole] == [step.get(name) for step in parts]
    assert [step["rewards/steady/weight"] for step in whole] == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.slow
def test_past_the_limit_the_run_ends_with_a_checkpoint_and_exit_code_3(tmp_path, capsys):
    (tmp_path / "down.py").write_text(
        "def down(completions, trainer_state, **columns):\n"
        "    if trainer_state.global_step >= 2:\n        raise ConnectionError('judge is down')\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    given = words(tmp_path, "run", [], 9, "--reward", f"{tmp_path / 'down.py'}:down", "--reward-error-limit", 2)
    assert main(given) == 3
    assert (
        "reward 'down' failed 2 calls in a row, the last with ConnectionError: judge is down" in capsys.readouterr().err
    )
    assert (tmp_path / "run" / "checkpoint-3").is_dir()


@pytest.mark.parametrize(
    "options, said",
    [
        (["--algorithm", "remax", "--reward-normalization", "batch"], "compares with the reward of a greedy answer"),
        (["--reward-normalization", "bach"], "Did you mean batch?"),
        (["--reward-clip", "2", "1"], "reward_clip=[2.0, 1.0] is no range"),
        (["--reward-weights", "sloped:1:0:5"], "give a number, or a schedule as 'linear:1:0:200'"),
        (["--reward-workers", "-1"], "reward_workers=-1 must be at least 0"),
    ],
)
def test_options_that_contradict_each_other_are_refused_before_any_step(tmp_path, capsys, options, said):
    assert main(words(tmp_path, "run", ["steady"], 1, *options)) == 2
    assert said in capsys.readouterr().err


def start(given):
    return subprocess.Popen(
        [sys.executable, "-m", "covey", *given], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ}
    )


def eventually(condition, seconds=180):
    until = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT twice"])
def test_no_worker_outlives_a_run_that_is_ended_while_its_reward_hangs_in_c(tmp_path, how):
    process = start(words(tmp_path, "run", ["stuck_for_ever"], 3))
    try:
        assert eventually(workers), "no worker was started"
        time.sleep(1.0)
        for _ in range(2):
            process.send_signal(how)
            time.sleep(1.2)  # within half a second it would count as the same signal
        assert process.wait(timeout=120) != 0
        assert eventually(lambda: not workers(), 60)
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


@pytest.mark.nightly
def test_what_holds_up_the_whole_process_ends_it_and_says_where(tmp_path):
    process = start(words(tmp_path, "run", ["stuck_here"], 3, "--reward-timeout-seconds", 0.5))
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert b"in stuck_here" in said
    assert b"troubled_rewards.py" in said
