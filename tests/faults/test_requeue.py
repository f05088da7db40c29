"""A scheduler that stops a run again and again, and starts the same command each time, loses nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from soak import Bench
from soak.bench import end_of, last_step, wait_until
from soak.victim import Plan

pytestmark = pytest.mark.timeout(900)  # processes of their own on a machine that others load


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    one = Bench(tmp_path, seed=3)
    yield one
    one.close()


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, pytest.param(10, marks=pytest.mark.nightly)])
def test_a_run_that_is_preempted_again_and_again_ends_bit_for_bit_and_started_once_more_does_nothing(
    bench: Bench, times: int
) -> None:
    whole, _ = bench.undisturbed(1)
    folder = bench.fresh()
    codes = []
    for _ in range(times):
        before = last_step(folder)
        process = bench.start(Plan(str(folder)))
        wait_until(lambda before=before, process=process: last_step(folder) > before or process.poll() is not None)
        os.kill(process.pid or 0, signal.SIGTERM)
        codes.append(bench.finish(process))
    assert set(codes) == {75}, "please start me again"
    assert bench.run(Plan(str(folder))) == 0
    assert end_of(folder) == whole
    saved = {path: path.stat().st_mtime_ns for path in folder.rglob("checkpoint-*/*")}
    assert bench.run(Plan(str(folder))) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("checkpoint-*/*")} == saved
    assert end_of(folder) == whole
