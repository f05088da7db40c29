"""Where the time of several adapters on one base goes: processor seconds of each part of `covey train --adapters N`, one thread.

    python benchmarks/adapter_shares.py --hidden 512 --layers 8 --steps 3

The configuration is that of `adapters.py`, with one evaluation of 16 prompts at the end. A part's seconds leave out those of the parts inside of it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from adapters import REWARD, make_base, options

from covey.cli import main as covey
from covey.learner import learner
from covey.rewards.scorer import Scoring
from covey.rollout import engine, forward, joint, scheduler
from covey.training import evaluator

PARTS: tuple[tuple[str, Any, str], ...] = (
    ("decode, all runs in one batch", joint._JointForward, "decode"),
    ("decode, one run alone", forward.ModulesForward, "decode"),
    ("prefill of the prompts", scheduler.Scheduler, "_prefill"),
    ("sampling and bookkeeping of rollouts", joint.JointRollouts, "__call__"),
    ("learner, forward", learner.Learner, "_loss"),
    ("learner, backward", learner.Learner, "_backward"),
    ("learner, optimizer and update", learner.Learner, "_update"),
    ("learner, the rest", learner.Learner, "step"),
    ("weights to the sampler", engine.NativeSampler, "load"),
    ("rewards", Scoring, "finish"),
    ("evaluation", evaluator.Evaluator, "__call__"),
)
"""Part, its class and its method. Decode and prefill of an evaluation count as the evaluation's."""


class Clock:
    """Processor seconds by part, each without those inside of it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.stack: list[str] = ["the rest: start, loading, records, checkpoints"]
        self.since = time.process_time()

    def turn(self) -> None:
        now = time.process_time()
        self.seconds[self.stack[-1]] += now - self.since
        self.since = now

    def around(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            if part.startswith("decode") and "decode" in self.stack[-1]:  # the modules of a joint batch
                return method(*given, **named)
            self.turn()
            self.stack.append(f"evaluation: {part}" if "evaluation" in self.stack and part != "evaluation" else part)
            try:
                return method(*given, **named)
            finally:
                self.turn()
                self.stack.pop()

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"adapters": 4, "steps": 3, "hidden": 512, "layers": 8, "completions": 16, "tokens": 48}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    clock = Clock()
    for part, owner, name in PARTS:
        setattr(owner, name, clock.around(part, getattr(owner, name)))
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        make_base(base, given.hidden, given.layers)
        (Path(folder) / "reward.py").write_text(REWARD)
        evaluated = ["--eval-dataset", "demo:test", "--max-eval-prompts", "16", "--num-generations-eval", "1"]
        words = [*options(base, given), *evaluated, "--adapters", str(given.adapters), "--output-dir", f"{folder}/runs"]
        clock.seconds.clear()
        clock.turn()
        if code := covey(["train", *words]):
            sys.exit(code)
        clock.turn()
    whole = sum(clock.seconds.values())
    print("| part | processor s | share |\n|---|--:|--:|")
    for part, seconds in sorted(clock.seconds.items(), key=lambda item: -item[1]):
        print(f"| {part} | {seconds:.1f} | {seconds / whole:.1%} |")
    print(f"| all | {whole:.1f} | |")


if __name__ == "__main__":
    main()
