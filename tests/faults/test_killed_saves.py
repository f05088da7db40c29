"""A real run is killed at the system calls of a save and a prune, and started again: it ends as the run that was left alone."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from saving import CALLS, Saver

from covey.runs import checkpoint, checksums
from runs.resume_cases import Case, differences
from soak.bench import resumed_from

HERE = Path(__file__).parent
STEPS = 4
EVERY = int(os.environ.get("COVEY_EVERY_KILL", "40"))
"""Every so many calls are killed; 1: all of them, in two or three minutes."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


class Runs(Saver):
    """Training runs in processes of their own; `save` does the second step's save under strace."""

    words = (HERE / "killed_saves.py", HERE.parent)

    def finish_run(self, folder: Path) -> int:
        """Train to the last step, from where the folder's run stopped."""
        os.kill(self.start(folder, 0, STEPS), signal.SIGCONT)
        return self.finish()


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    if shutil.which("strace") is None or subprocess.run(["strace", "-f", "true"], capture_output=True).returncode != 0:
        pytest.skip("strace is not installed, or not permitted here")
    with Runs() as server:
        yield server


def calls_of_the_save(runs: Runs, folder: Path) -> list[tuple[str, int]]:
    """The system calls of the thread that writes, in order: name, and how many of that name it made by then."""
    log = folder.with_suffix(".log")
    assert runs.save(folder, 2, "-f", "-o", str(log), "-e", f"trace={CALLS}") == 0
    found = re.findall(r"^(\d+)\s+(\w+)\(.*", log.read_text(), re.MULTILINE)
    writer = next(line.split()[0] for line in log.read_text().splitlines() if "checkpoint-2.tmp-" in line)
    names = [name for thread, name in found if thread == writer]
    counts: Counter[str] = Counter()
    calls = []
    for name in names:
        counts[name] += 1
        calls.append((name, counts[name]))
    return calls


def test_a_run_killed_at_a_system_call_of_a_save_ends_bit_for_bit_once_it_is_started_again(
    runs: Runs, tmp_path: Path
) -> None:
    whole, case = tmp_path / "whole", Case("killed")
    assert runs.finish_run(whole) == 0
    calls = calls_of_the_save(runs, tmp_path / "counted")
    assert len(calls) > 60
    began_from = Counter[int]()
    for call, number in calls[::EVERY]:
        killed = tmp_path / f"{call}-{number}"
        kill = ["-e", f"trace={call}", "-e", f"inject={call}:signal=SIGKILL:when={number}"]
        assert runs.save(killed, 2, "-f", "-o", "/dev/null", *kill) == -signal.SIGKILL
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a kill must not even leave a damaged checkpoint behind
            newest = checkpoint.latest(killed)
        assert newest is not None
        assert checksums.problems(newest) == []
        assert runs.finish_run(killed) == 0
        began_from[resumed_from(killed)] += 1
        assert resumed_from(killed) == checkpoint.step_of(newest)
        assert differences(case, whole, killed) == {}, f"killed at {call} {number}"
        assert [path.name for path in killed.iterdir() if ".tmp-" in path.name] == []
        shutil.rmtree(killed)
    assert set(began_from) == {1, 2}, "kills before and after the new checkpoint counted"
