"""Control paths that grow with the ranks, simulated in one process: CPU seconds and MiB of each for 10, 100 and 1,000 ranks.

    python benchmarks/scale_control.py --ranks 10 100 1000

Each rank adds 8 completions of 128 tokens, 100 metrics, and one file of a sharded checkpoint. What a rank does is timed on this process with the
run's own code; the network between ranks is not. Slope: how time grows with the ranks, on logarithms (1: in proportion).
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from covey.process.heartbeat import Heartbeat, HeartbeatState
from covey.process.tensor_bytes import from_bytes, to_bytes
from covey.runs import checkpoint, checksums, rollouts
from covey.types import Completion, Group, Mean, Prompt, merge_metrics

GROUP, TOKENS, METRICS = 8, 128, 100


class Store:
    """Keys of a store in this process."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}
        self.asked = 0

    def set(self, key: str, value: str) -> None:
        self.held[key] = value

    def get(self, key: str) -> bytes:
        return self.held[key].encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked += 1
        return [self.held[key].encode() for key in keys]

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        return all(key in self.held for key in keys)


def group_of(rank: int) -> Group:
    draw = torch.Generator().manual_seed(rank)
    ids = lambda: torch.randint(1000, (TOKENS,), generator=draw)
    answers = tuple(
        Completion(token_ids=ids(), text="x" * 400, finish="stop", logprobs=torch.rand(TOKENS)) for _ in range(GROUP)
    )
    prompt = Prompt(uid=str(rank), token_ids=tuple(range(64)))
    return Group(prompt=prompt, completions=answers, rewards=torch.rand(GROUP, 1), advantages=torch.rand(GROUP))


def parts(ranks: int, folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each part by name, and the work of it that one rank (the main one) does."""
    groups = [group_of(rank) for rank in range(ranks)]
    sent = [to_bytes([group]) for group in groups]
    longest = max(one.numel() for one in sent)
    arrived = [torch.nn.functional.pad(one, (0, longest - one.numel())) for one in sent]
    yield "gather of rollouts", lambda: [from_bytes(one) for one in arrived]
    metrics = [{f"m{i}": Mean(float(rank), 1.0) for i in range(METRICS)} for rank in range(ranks)]
    yield "metrics merged", lambda: merge_metrics(metrics)
    yield "rollouts written", lambda: rollouts.write(folder / "rollouts", 1, groups, ["reward"])
    shards = folder / "checkpoint-1"
    (shards / "sharded").mkdir(parents=True)
    for rank in range(ranks):
        (shards / "sharded" / f"__{rank}_0.distcp").write_bytes(b"x" * 4096)
    yield "checkpoint sealed", lambda: checksums.seal(shards, 1)
    yield "checkpoint found", lambda: checkpoint.latest(folder)
    store = Store()
    pulse = Heartbeat(store, 0, ranks, silence=60.0, patience=600.0)
    for rank in range(ranks):
        store.set(f"covey/heartbeat/{rank}", json.dumps(asdict(HeartbeatState(beat=1, place="the loop"))))
    pulse._listen()
    before = store.asked
    pulse._listen()
    assert store.asked == before + 1, "a beat is one request of the store"
    yield "heartbeats read", pulse._listen


def measured(work: Callable[[], Any], repeats: int = 5) -> tuple[float, float]:
    """CPU seconds of the quickest of some, and MiB at the peak of Python's memory."""
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return min(seconds), peak / 2**20


def slope_of(ranks: list[int], seconds: list[float]) -> float:
    """Least squares on logarithms."""
    xs, ys = [math.log(r) for r in ranks], [math.log(s) for s in seconds]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[10, 100, 1000])
    ranks = sorted(parser.parse_args().ranks)
    found: dict[str, list[tuple[float, float]]] = {}
    for count in ranks:
        with tempfile.TemporaryDirectory() as folder:
            for name, work in parts(count, Path(folder)):
                found.setdefault(name, []).append(measured(work))
    print("| part | " + " | ".join(f"{count} ranks: ms, MiB" for count in ranks) + " | slope |")
    print("|---|" + "--:|" * (len(ranks) + 1))
    for name, cells in found.items():
        shown = " | ".join(f"{1000 * seconds:.3g}, {peak:.2g}" for seconds, peak in cells)
        print(f"| {name} | {shown} | {slope_of(ranks, [seconds for seconds, _ in cells]):.2f} |")


if __name__ == "__main__":
    main()
