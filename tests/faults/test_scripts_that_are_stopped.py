"""A training script of a user's own that is told to stop: it saves, says how to go on, and does not go on as if it had trained."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from saving import wait_until
from small_runs import lines

from covey.runs import checkpoint, checksums
from forked import Forked

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]
SCRIPT = """
import sys
sys.path[:0] = sys.argv[2:4]
import torch
torch.set_num_threads(1)
from pathlib import Path
from small_runs import trainer

def reward(completions, **columns):
    print("scoring", len(completions))
    sys.stderr.write("scoring\\n")
    return [float(len(text)) for text in completions]

steps = int(sys.argv[4])
one = trainer(Path(sys.argv[1]), max_steps=steps, save_steps=steps, reward_funcs=reward, disable_tqdm=False)
one.train()
Path(sys.argv[1], "went-on").write_text("as if it had trained")
one.save_model(str(Path(sys.argv[1], "final")))
"""


def start(run: Path, steps: int, **how: Any) -> Forked:
    return Forked("-c", SCRIPT, run, TESTS / "faults", TESTS, str(steps), **how)


def trained_steps(run: Path) -> int:
    return len(lines(run)) if (run / "metrics.jsonl").is_file() else 0


@pytest.mark.parametrize(
    "number, code",
    [
        pytest.param(signal.SIGINT, -signal.SIGINT, marks=pytest.mark.nightly),
        (signal.SIGTERM, 75),
        pytest.param(signal.SIGUSR1, 75, marks=pytest.mark.nightly),
    ],
)
def test_a_script_that_is_stopped_saves_says_how_to_go_on_and_ends_there(number, code, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start(run, 100_000) as process:
        wait_until(lambda: trained_steps(run) >= 2 or process.poll() is not None)
        process.send_signal(number)
        assert process.wait(120) == code, process.err
        said = process.err
    (saved,) = checkpoint.checkpoints(run)
    assert checksums.problems(saved) == []
    told = f"Stopped by {number.name} after step {checkpoint.step_of(saved)}. {saved.name} is whole, in {run}."
    assert f"{told} Go on with trainer.train(resume_from_checkpoint=True)." in said
    assert not (run / "went-on").exists()
    assert ("KeyboardInterrupt" in said) == (number == signal.SIGINT)


def test_sigterm_and_ctrl_c_a_second_later_still_end_with_the_save(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start(run, 100_000) as process:
        wait_until(lambda: trained_steps(run) >= 2 or process.poll() is not None)
        process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(120)
    assert [checksums.problems(saved) for saved in checkpoint.checkpoints(run)] == [[]]


def is_whole(run: Path, steps: int) -> None:
    assert trained_steps(run) == steps
    assert [checksums.problems(saved) for saved in checkpoint.checkpoints(run)] == [[]]
    assert (run / "went-on").exists()
    assert (run / "final" / "model.safetensors").is_file()
    assert '"state": "finished"' in (run / "run.json").read_text()
    assert not (run / "events.jsonl").exists() or "reward" not in (run / "events.jsonl").read_text()


@pytest.mark.parametrize(
    "closed", [pytest.param(ends, marks=pytest.mark.nightly) for ends in ("1", "2", "1 2", "0 1 2")]
)
def test_a_run_whose_output_was_closed_before_it_began_is_complete(closed: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ends = " ".join(f"{number}>&-" for number in closed.split())
    command = [sys.executable, "-c", SCRIPT, str(run), str(TESTS / "faults"), str(TESTS), "6"]
    done = subprocess.run(["sh", "-c", f'"$@" {ends}', "sh", *command], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0
    is_whole(run, 6)
    assert "scoring" not in (run / "metrics.jsonl").read_text(), "no file of the run became stdout"


@pytest.mark.parametrize(
    "which", [*[pytest.param(end, marks=pytest.mark.nightly) for end in ("stdout", "stderr")], "both"]
)
def test_a_run_whose_reader_goes_away_is_complete(which: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    reading, writing = os.pipe()
    streams = {name: writing for name in ("stdout", "stderr") if which in (name, "both")}
    with start(run, 30, **streams) as process:
        os.close(writing)
        wait_until(lambda: trained_steps(run) >= 2 or process.poll() is not None)
        os.close(reading)
        process.wait(timeout=120)
    is_whole(run, 30)
    assert process.returncode == 0


def test_a_run_whose_terminal_is_closed_is_complete(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ours, theirs = os.openpty()
    terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "is_session": True}
    with start(run, 60, **terminal) as process:
        os.close(theirs)
        os.set_blocking(ours, False)
        wait_until(lambda: (drain(ours), trained_steps(run) >= 2 or process.poll() is not None)[1])
        os.close(ours)
        os.kill(process.pid, signal.SIGHUP)
        process.wait(timeout=120)
    is_whole(run, 60)


def drain(descriptor: int) -> None:
    """What a terminal would show: one that nobody reads from would hold the process up."""
    try:
        while os.read(descriptor, 65536):
            pass
    except OSError:
        return
