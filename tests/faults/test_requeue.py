"""A scheduler that stops a run again and again, and starts the same command each time, loses nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.faults import Bench
from covey.faults.bench import end_of, last_step, wait_until
from covey.faults.victim import Plan
from covey.runs import checkpoint

SCRIPT = Path(__file__).parent / "two_ranks.py"
pytestmark = pytest.mark.timeout(900)  # processes of their own on a machine that others load


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    one = Bench(tmp_path, seed=3)
    yield one
    one.close()


@pytest.mark.slow
def test_a_run_that_is_preempted_ten_times_ends_bit_for_bit_and_started_once_more_does_nothing(bench: Bench) -> None:
    whole, _ = bench.undisturbed(1)
    folder = bench.fresh()
    codes = []
    for _ in range(10):
        before = last_step(folder)
        process = bench.start(Plan(str(folder)))
        wait_until(lambda before=before, process=process: last_step(folder) > before or not process.is_alive())
        os.kill(process.pid or 0, signal.SIGTERM)
        codes.append(bench.finish(process))
    assert set(codes) == {75}, "please start me again"
    assert bench.run(Plan(str(folder))) == 0
    assert end_of(folder) == whole
    saved = {path: path.stat().st_mtime_ns for path in folder.rglob("checkpoint-*/*")}
    assert bench.run(Plan(str(folder))) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("checkpoint-*/*")} == saved
    assert end_of(folder) == whole


@pytest.mark.slow
def test_torchrun_starts_a_run_again_whose_rank_was_killed(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    command += ["--master-port", str(port), str(SCRIPT), str(SCRIPT.parents[1]), str(tmp_path), "kill once", "auto"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "PATIENCE": "120"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "at").exists(), "the fault was injected"
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    assert newest.name == "checkpoint-5"
