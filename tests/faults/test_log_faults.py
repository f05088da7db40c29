"""A full disk never stops the logs for good, tears a line, or loses one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from covey.runs import RunFolder
from covey.runs.metrics import JsonLines, read
from covey.types import Completion, Group, Prompt


def append_many(log: JsonLines) -> None:
    for step in range(2, 100):
        log.append({"step": step, "text": "x" * 100})


def test_lines_wait_while_the_disk_is_full_and_follow_when_there_is_room(small_disk: Path) -> None:
    log = JsonLines(small_disk / "metrics.jsonl")
    log.append({"step": 1})
    ballast = small_disk / "ballast"
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    with pytest.warns(UserWarning, match=r"metrics.jsonl: no space is left .* Training goes on") as seen:
        append_many(log)
    assert len(seen) == 1  # one warning, not one a step
    first = [row["step"] for row in read(log.path)]
    assert first == list(range(1, len(first) + 1))
    assert len(first) < 50
    assert log.path.read_bytes().endswith(b"\n")
    ballast.unlink()
    with pytest.warns(UserWarning, match="can be written again"):
        log.append({"step": 100})
    assert [row["step"] for row in read(log.path)] == list(range(1, 101))


def test_a_killed_process_loses_no_line_that_it_appended(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom itertools import count\nfrom covey.runs.metrics import JsonLines\n"
        "log = JsonLines(Path(sys.argv[1]))\n"
        "for step in count(1):\n    log.append({'step': step})\n    print(step, flush=True)\n"
    )
    path = tmp_path / "metrics.jsonl"
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGKILL)
        told = [int(line) for line in process.stdout.read().splitlines() if line]
    steps = [row["step"] for row in read(path)]
    assert steps == list(range(1, len(steps) + 1))
    assert steps[-1] >= told[-1]


def test_a_full_disk_costs_rollouts_and_the_manifest_a_warning_and_leaves_no_part(small_disk: Path) -> None:
    prompt = Prompt(uid="0", token_ids=(), text="x" * 1000)
    noise = torch.randint(0, 2**62, (60_000,))
    group = Group(prompt=prompt, completions=(Completion(token_ids=noise, text="", finish="stop"),))
    run = RunFolder.create(small_disk / "run")
    with pytest.warns(UserWarning, match=r"rollouts could not be written .* Training goes on without this record"):
        run.write_rollouts(1, [group], [])
    run.write_rollouts(2, [group], [])  # told once
    assert list((run.path / "rollouts").iterdir()) == []
    run.describe(args={})
    with open(small_disk / "ballast", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    before = (run.path / "run.json").read_bytes()
    with pytest.warns(UserWarning, match=r"run.json could not be written"):
        run.close()
    assert (run.path / "run.json").read_bytes() == before
    (small_disk / "ballast").unlink()
    small = Group(prompt=prompt, completions=(Completion(token_ids=noise[:9], text="", finish="stop"),))
    run.write_rollouts(3, [small], [])
    assert [path.name for path in (run.path / "rollouts").iterdir()] == ["step-000003.parquet"]
