"""Control paths with up to 1,000 simulated ranks: the work of a process grows no faster than their number."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from torch.distributed import HashStore

from covey.process.heartbeat import Heartbeat, HeartbeatState
from covey.process.world import World
from covey.types import Mean

SIZES = (100, 1000)


@dataclass(frozen=True)
class Simulated(World):
    """A process among others whose items are like its own."""

    def gather(self, items: Any) -> list[list[Any]]:
        return [list(items) for _ in range(self.size)]


def heartbeat(size: int) -> Heartbeat:
    """That of rank 0, to whom every other rank has published the same progress, in a store of PyTorch's."""
    store = HashStore()
    made = Heartbeat(store, 0, size, silence=1e6, patience=1e6)
    for rank in range(1, size):
        store.set(f"covey/heartbeat/{rank}", json.dumps(asdict(HeartbeatState(process=f"process {rank}", beat=1))))
    made._listen()
    made._waits_since = 0.0  # in a collective since long ago
    assert len(made.others) == size - 1
    return made


def looks(size: int) -> Callable[[], Any]:
    return heartbeat(size).failure_reason


def hears(size: int) -> Callable[[], Any]:
    made = heartbeat(size)
    return lambda: made.hears_stop(False)


def listens(size: int) -> Callable[[], Any]:
    return heartbeat(size)._listen


def agrees(size: int) -> Callable[[], Any]:
    return lambda: Simulated(size=size).expect_same({"rows of train_dataset": 7, "seed": 0})


def merges(size: int) -> Callable[[], Any]:
    return lambda: Simulated(size=size).merge({"reward": Mean(1.0, 2), "length": Mean(3.0, 4)})


def interleaves(size: int) -> Callable[[], Any]:
    return lambda: Simulated(size=size).interleave([1, 2, 3])


def shares(size: int) -> Callable[[], Any]:
    return lambda: Simulated(size=size).share(range(4 * size))


def steps(call: Callable[[], Any]) -> int:
    """Instructions that a call executes in Python."""
    count = 0

    def traced(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("path", [looks, hears, listens, agrees, merges, interleaves, shares])
def test_work_of_a_process_is_at_most_linear_in_the_ranks(path):
    some, many = (steps(path(size)) for size in SIZES)
    slope = math.log10(many / some)
    assert slope <= 1.1


def test_the_slope_of_quadratic_work_would_be_seen():
    pairs = lambda size: lambda: [(a, b) for a in range(size) for b in range(size)]
    assert math.log10(steps(pairs(100)) / steps(pairs(10))) > 1.8
