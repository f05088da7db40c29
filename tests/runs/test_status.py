"""A run that says it is running is asked for: a process that was killed could not write that it died."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from covey.evaluation.compare.run_data import read_runs
from covey.monitor.view.reading import RunView
from covey.runs import RunFolder, manifest, status

SCRIPT = """
import sys, time
from pathlib import Path
from covey.runs import RunFolder
folder = RunFolder.create(sys.argv[1])
folder.describe(args={"seed": 1})
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_run_that_was_killed_is_read_as_died_and_a_resumed_one_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(run)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        written = manifest.read(run / "run.json")
        assert written is not None
        assert status.state_of(written, run) == "running"
        process.kill()
        while status.is_alive(process.pid):
            time.sleep(0.01)
        assert status.state_of(written, run) == "died", "although nobody has waited for the process yet"
        process.wait()
    assert status.state_of(written, run) == "died"
    assert written["state"] == "running", "the file itself cannot know"
    assert RunView("run", run).manifest()["state"] == "died"
    assert read_runs(str(run))[0].manifest["state"] == "died", "what covey compare goes by"
    again = RunFolder.create(run)
    found = again.describe(args={"seed": 1})
    assert [one.get("state") for one in found["attempts"]] == ["died", None]
    assert status.state_of(found, run) == "running"
    again.close("stopped")
    closed = manifest.read(run / "run.json")
    assert closed is not None
    assert status.state_of(closed, run) == "stopped"


def test_another_process_with_the_same_number_is_not_the_run() -> None:
    assert status.is_alive(os.getpid())
    assert status.is_alive(os.getpid(), status.mark_of(os.getpid()))
    assert not status.is_alive(os.getpid(), "another-boot/12345")


def test_a_run_on_another_machine_is_silent_after_six_hours(tmp_path: Path) -> None:
    found = {"state": "running", "attempts": [{"process": 1, "host": platform.node() + "-other"}]}
    record = tmp_path / "metrics.jsonl"
    record.write_text("{}")
    assert status.state_of(found, tmp_path) == "running"
    os.utime(record, (0, time.time() - 7 * 3600))
    assert status.state_of(found, tmp_path) == "silent"


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"state": 3},
        {"state": "running", "attempts": 4},
        {"state": "running", "attempts": [[]]},
        {"state": "running", "attempts": [{"process": -1, "host": platform.node()}]},
        {"state": "running", "attempts": [{"process": 10**20, "host": platform.node()}]},
    ],
)
def test_odd_manifests_are_read_without_an_error(odd: dict[str, Any], tmp_path: Path) -> None:
    assert isinstance(status.state_of(odd, tmp_path), str)
