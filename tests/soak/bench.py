"""Test bench that starts victim runs, watches them and inspects their folders afterwards."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from covey.runs import checkpoint, checksums
from covey.runs.metrics import read
from forked import Forked, run
from soak.victim import END, Plan

WAIT_SECONDS = 600.0
"""A victim that takes longer hangs."""
TESTS = Path(__file__).parents[1]
WORK = """
import json
import sys

sys.path.insert(0, sys.argv[1])
from soak.victim import Plan, work

work(Plan(**json.loads(sys.argv[2])))
"""


class Bench:
    """A folder for the runs, the numbers that nothing disturbed, and processes forked from one that has imported everything."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self._runs = 0
        self.undisturbed = cache(self._undisturbed)
        self.started: list[Forked] = []

    def fresh(self) -> Path:
        """The folder of a new run."""
        self._runs += 1
        return self.folder / f"run-{self._runs:04d}"

    def clear_last(self, *, keep: bool) -> None:
        """Remove the newest run, unless it is worth a look."""
        if not keep:
            clear(self.folder / f"run-{self._runs:04d}")

    def start(self, plan: Plan) -> Forked:
        process = Forked("-c", WORK, TESTS, json.dumps(asdict(plan)))
        self.started.append(process)
        return process

    def finish(self, process: Forked, seconds: float = WAIT_SECONDS) -> int | None:
        """The exit code, negative when a signal ended it; None: it hung, and was killed."""
        self.started.remove(process)
        with process, contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(seconds)
        return None

    def run(self, plan: Plan) -> int | None:
        return self.finish(self.start(plan))

    def start_pair(self, plan: Plan) -> list[Forked]:
        """Two processes of one run."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        facts = {**plan.__dict__, "size": 2, "port": port}
        return [self.start(Plan(**{**facts, "rank": rank})) for rank in range(2)]

    def close(self) -> None:
        """Nothing that was started here runs on."""
        for process in self.started:
            with process:
                pass
        self.started.clear()

    def _undisturbed(self, size: int = 1) -> tuple[str, float]:
        """The weights' hash of a run that nothing happened to, and its seconds from the start to the end."""
        run("-c", "pass")  # the process that all others are forked from imports everything first
        folder = self.fresh()
        started = time.monotonic()
        plan = Plan(str(folder))
        codes = [self.run(plan)] if size == 1 else [self.finish(one) for one in self.start_pair(plan)]
        if any(codes):
            log = Path(f"{folder}-rank0.log")
            raise RuntimeError(f"a run that nothing happened to ended with {codes}: {log.read_text()[-2000:]}")
        return end_of(folder), time.monotonic() - started


def end_of(folder: Path) -> str:
    """The hash that a finished run left; empty for one that did not finish."""
    path = folder / END
    return path.read_text() if path.is_file() else ""


def last_step(folder: Path) -> int:
    """The newest step in the records."""
    path = folder / "metrics.jsonl"
    steps = [row["step"] for row in read(path)] if path.is_file() else []
    return max(steps, default=0)


def resumed_from(folder: Path) -> int:
    """The step that the newest attempt went on from."""
    found = json.loads((folder / "run.json").read_text())
    return int(found["attempts"][-1]["from_step"])


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The run's events of one kind."""
    path = folder / "events.jsonl"
    return [row for row in read(path) if row.get("kind") == kind] if path.is_file() else []


def damaged(folder: Path) -> list[str]:
    """Checkpoints under their final name that do not verify."""
    return [path.name for path in checkpoint.checkpoints(folder) if checksums.problems(path)] if folder.is_dir() else []


def clear(folder: Path) -> None:
    """Remove a run and its logs."""
    shutil.rmtree(folder, ignore_errors=True)
    for log in folder.parent.glob(f"{folder.name}-rank*.log"):
        log.unlink()


def wait_until(condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> bool:
    """Wait until the condition holds. False after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
