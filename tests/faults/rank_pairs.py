"""Two processes of one run."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forked import Forked, free_port, rank_environment

SCRIPT = Path(__file__).parent / "two_ranks.py"


class Pair:
    """Two processes of one run, without a launcher that would end one when the other ends."""

    def __init__(self, folder: Path, fault: str, *more: str, patience: int = 60) -> None:
        self.folder, port = folder, free_port()
        self.processes = []
        for rank in range(2):
            env = {**rank_environment(rank, port), "PATIENCE": str(patience)}
            words = [SCRIPT, SCRIPT.parents[1], folder, fault, *more]
            with open(folder / f"{rank}.err", "a") as errors:
                self.processes.append(Forked(*words, env=env, stderr=errors.fileno(), stdout=errors.fileno()))

    def said(self, rank: int) -> str:
        return (self.folder / f"{rank}.err").read_text()

    def ends(self, rank: int, seconds: float = 300) -> int:
        """The exit code of a process that ends by itself."""
        try:
            return self.processes[rank].wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"rank {rank} still runs after {seconds} s: {self.said(rank)[-3000:]}")


@contextmanager
def pair(folder: Path, fault: str, *more: str, patience: int = 60) -> Iterator[Pair]:
    both = Pair(folder, fault, *more, patience=patience)
    try:
        yield both
    finally:
        for process in both.processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
