"""A disk that takes its time: steps go on beside the write, writes never overlap, and the end waits for the last one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(900)  # processes of their own on a machine that others load


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_training_goes_on_beside_a_disk_that_takes_seconds_for_a_save(tmp_path: Path) -> None:
    """Every flush takes 0.3 s longer, so a save takes several seconds and a step a fraction of one."""
    delay = ["-e", "trace=fsync", "-e", "inject=fsync:delay_enter=300000"]
    command = ["strace", "-f", "-qq", "--seccomp-bpf", "-o", "/dev/null", *delay]
    if subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        pytest.skip("strace is not permitted here")
    script = [sys.executable, "-W", "ignore", str(HERE / "slow_disk.py"), str(HERE.parent), str(tmp_path / "run"), "7"]
    done = subprocess.run(
        [*command, *script], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(count <= 1 for _, count, _ in found["seen"]), "two saves never overlap"
    beside = [step for step, count, _ in found["seen"] if count]
    assert {4, 5} & set(beside), f"steps went on while checkpoint-3 was written: {found['seen']}"
    at_six = next(names for step, _, names in found["seen"] if step == 6)
    assert "checkpoint-3" in at_six, "the next save waits for the one before"
    assert found["good"][:2] == ["checkpoint-3", "checkpoint-6"], "the end waits for the write"
