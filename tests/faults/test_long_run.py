"""Hundreds of steps, saves and hanging rewards: files, threads, children and memory stay as they were."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
STEPS = 400
pytestmark = pytest.mark.timeout(900)  # processes of their own on a machine that others load


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_long_run_holds_no_more_at_its_end_than_early_on(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(HERE / "long_run.py"), str(HERE.parent), str(tmp_path), str(STEPS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    early, late = ([row for row in seen if low <= row[0] < low + 100] for low in (100, STEPS - 100))
    for column, what in ((2, "open files"), (3, "threads"), (4, "children")):
        assert max(row[column] for row in late) <= max(row[column] for row in early) + 1, what
    growth = min(row[1] for row in late) - max(row[1] for row in early)
    assert growth < 6, f"MiB within {STEPS - 200} steps: {seen}"
