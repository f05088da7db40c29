"""`torchrun --max-restarts`: killed workers are started again by the launcher itself, and the run ends as one that was left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rank_pairs import pair

from forked import run
from kit import rest_nightly

SCRIPT = Path(__file__).parent / "two_ranks.py"
pytestmark = pytest.mark.timeout(1800)  # eight processes in a row on a machine that others load


def torchrun(folder: Path, *words: str, late: str = "") -> None:
    """Run the pair of ranks to its end under the launcher."""
    folder.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    done = subprocess.run(
        [*launcher, str(SCRIPT), str(SCRIPT.parents[1]), str(folder), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **patient(late)},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-5000:]


def forked_torchrun(folder: Path, *words: str, late: str = "") -> None:
    """The same launcher, whose ranks begin as forks of it."""
    folder.mkdir()
    launcher = [SCRIPT.with_name("relaunched.py"), SCRIPT]
    done = run(*launcher, SCRIPT.parents[1], folder, *words, env=patient(late), timeout=1500)
    assert done.returncode == 0, done.err[-5000:]


def patient(late: str) -> dict[str, str]:
    return {"GLOO_SOCKET_IFNAME": "lo", "PATIENCE": "120", "LATE": late}


def left_alone(folder: Path, what: str) -> None:
    """The same pair without the launcher."""
    folder.mkdir()
    with pair(folder, what) as both:
        assert [both.ends(0), both.ends(1)] == [0, 0], both.said(0)[-2000:]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "launch, kills, late",
    rest_nightly([(forked_torchrun, 1, "1"), (torchrun, 2, "0,1"), (torchrun, 2, "1,0")], 1),
)
def test_killed_workers_are_started_again_by_torchrun_and_the_run_ends_bit_for_bit(
    launch: Callable[..., None], kills: int, late: str, tmp_path: Path
) -> None:
    killed, whole = tmp_path / "killed" / "run", tmp_path / "whole" / "run"
    times, last = {1: ("first", 5), 2: ("twice", 6)}[kills]
    launch(killed.parent, f"kill {times}", "auto", late=late)
    left_alone(whole.parent, f"none {times}")
    attempts = json.loads((killed / "run.json").read_text())["attempts"]
    assert [one["from_step"] > 0 for one in attempts] == [False] + [True] * kills, "each went on where the last one was"
    for name in ("model.safetensors", "covey_state.safetensors"):
        content = [(folder / f"checkpoint-{last}" / name).read_bytes() for folder in (killed, whole)]
        assert content[0] == content[1]


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="the processes would take the accelerator")
def test_processes_without_an_accelerator_are_one_run_also_when_no_option_says_that_a_cpu_is_meant(
    tmp_path: Path,
) -> None:
    left_alone(tmp_path / "both", "no word of a CPU")
    metrics = [json.loads(line) for line in (tmp_path / "both" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["num_completions"]) for line in metrics] == [(step, 4.0) for step in range(1, 6)]
