"""Hundreds of steps, saves and hanging rewards: files, threads, children and memory stay as they were."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
STEPS = 400
pytestmark = pytest.mark.timeout(900)  # processes of their own on a machine that others load


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_long_run_holds_no_more_at_its_end_than_early_on(tmp_path: Path) -> None:
    seen = held(tmp_path, STEPS)
    early, late = ([row for row in seen if low <= row[0] < low + 100] for low in (100, STEPS - 100))
    expect_flat(early, late)
    growth = min(row[1] for row in late) - max(row[1] for row in early)
    assert growth < 6, f"MiB within {STEPS - 200} steps: {seen}"


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_grows_by_less_than_a_mebibyte_in_a_thousand_steps(tmp_path: Path) -> None:
    """Ten thousand steps; COVEY_LONG_RUN sets another number. The slope is a least-squares line from a tenth of them on."""
    steps = int(os.environ.get("COVEY_LONG_RUN", "10000"))
    seen = [row for row in held(tmp_path, steps, seconds=4 * 3600) if row[0] >= steps // 10]
    expect_flat(seen[:5], seen[-5:])
    slope, _ = statistics.linear_regression([row[0] / 1000 for row in seen], [row[1] for row in seen])
    assert slope < 1, f"{slope:.2f} MiB in a thousand steps"


def held(folder: Path, steps: int, seconds: int = 900) -> list[list[float]]:
    """`[step, MiB, files, threads, children]` every 20 steps of a run of its own."""
    command = [sys.executable, "-W", "ignore", str(HERE / "long_run.py"), str(HERE.parent), str(folder), str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def expect_flat(early: list[list[float]], late: list[list[float]]) -> None:
    for column, what in ((2, "open files"), (3, "threads"), (4, "children")):
        assert max(row[column] for row in late) <= max(row[column] for row in early) + 1, what
