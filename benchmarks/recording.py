"""What it costs to write down and to watch a run: the share of a step's time that each part of it takes, and bytes on the disk.

    python benchmarks/recording.py --model demo --steps 60
    python benchmarks/recording.py --model 10m --steps 20 --rollout-log-steps 1

`demo`: the shipped model on its task, 128 completions a step. `10m`: random weights, 32 completions of 200 tokens, which never end early. Each part is
timed where the training thread calls it. A part's cost a step is its mean time, however often it happens; its share is of the median step.
The first two steps are left out, where everything is loaded. With `--threads 1 --processor` processor time is counted, for a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from covey import GRPOConfig, GRPOTrainer, demo
from covey.monitor import Monitor
from covey.monitor.updates import UpdateMeter
from covey.runs import RunFolder

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from kit import tiny_tokenizer

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
}
WARM = 2
PARTS: dict[str, list[tuple[type, str]]] = {
    "metrics.jsonl, events.jsonl, alerts.jsonl": [
        (RunFolder, "append_metrics"),
        (RunFolder, "append_events"),
        (RunFolder, "append_alert"),
    ],
    "rollouts/": [(RunFolder, "write_rollouts")],
    "measuring the texts": [(Monitor, "measure")],
    "measuring the update": [(UpdateMeter, "before"), (UpdateMeter, "after")],
    "the detectors": [(Monitor, "look")],
    "KL to the start, memory": [(Monitor, "with_update")],
}
Found = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=["demo", "10m"], default=["demo", "10m"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each, whose steps are pooled")
    parser.add_argument("--rollout-log-steps", type=int, default=10, help="steps between files of rollouts")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--processor", action="store_true", help="processor time of this process instead of wall time")
    parser.add_argument("--out", type=Path, default=Path("out"))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.threads:
        torch.set_num_threads(given.threads)
    found = {name: measure(name, given) for name in given.model}
    for name, one in found.items():
        print(f"\n## {name}: {one['completions']} completions of {one['tokens']:.0f} tokens a step\n\n{table(one)}")
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "recording.json").write_text(json.dumps(found, indent=1))


class Clock(TrainerCallback):
    """When each step ended, and what each part had taken until then."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.ends: list[float] = []
        self.spent: list[dict[str, float]] = [{}]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(self.now())
        self.spent.append({})

    def add(self, part: str, seconds: float) -> None:
        self.spent[-1][part] = self.spent[-1].get(part, 0.0) + seconds


def measure(name: str, given: argparse.Namespace) -> Found:
    """The runs of one model, pooled."""
    now = time.process_time if given.processor else time.perf_counter
    steps: list[float] = []
    parts: dict[str, list[float]] = defaultdict(list)
    for seed in range(given.repeats):
        with tempfile.TemporaryDirectory() as folder:
            clock = Clock(now)
            one = trainer(name, Path(folder), given, seed, clock)
            with_clock(clock, one.train)
            rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
            size = sum(path.stat().st_size for path in (Path(folder) / "rollouts").glob("*"))
            files = max(1, len(list((Path(folder) / "rollouts").glob("*"))))
            line = (Path(folder) / "metrics.jsonl").stat().st_size / len(rows)
        steps += [end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)][WARM - 1 :]
        for spent in clock.spent[WARM:-1]:
            for part, seconds in spent.items():
                parts[part].append(seconds)
    completions = one.args.per_device_train_batch_size * one.args.gradient_accumulation_steps
    return {
        "step": statistics.median(steps),
        "steps": len(steps),
        "parts": {part: {"median": statistics.median(s), "mean": statistics.mean(s), "times": len(s), "longest": max(s)} for part, s in parts.items()},
        "completions": completions,
        "tokens": statistics.mean(row["completions/mean_length"] for row in rows),
        "every": given.rollout_log_steps,
        "line_bytes": line,
        "rollout_bytes": size / files,
    }  # fmt: skip


def with_clock(clock: Clock, run: Callable[[], Any]) -> None:
    """Call `run` while every part tells the clock what it takes."""
    kept = {(owner, name): getattr(owner, name) for calls in PARTS.values() for owner, name in calls}
    for part, calls in PARTS.items():
        for owner, name in calls:
            setattr(owner, name, _timed(clock, part, kept[owner, name]))
    try:
        run()
    finally:
        for (owner, name), call in kept.items():
            setattr(owner, name, call)


def _timed(clock: Clock, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        started = clock.now()
        try:
            return call(*args, **kwargs)
        finally:
            clock.add(part, clock.now() - started)

    return timed


def trainer(name: str, folder: Path, given: argparse.Namespace, seed: int, clock: Clock) -> GRPOTrainer:
    options: Found = {
        "output_dir": str(folder),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "rollout_log_steps": given.rollout_log_steps,
        "seed": seed,
    }
    if name == "demo":
        options = {**demo.DEMO_SETTINGS, **options, "max_steps": given.steps}
        rows = demo.rows("train")
        return GRPOTrainer(
            str(demo.model_path()), demo.reward, GRPOConfig(**options), Dataset.from_list(rows), callbacks=[clock]
        )
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**shape, **SHAPE, eos_token_id=1, pad_token_id=0))
    options |= {"per_device_train_batch_size": 32, "num_generations": 8, "max_completion_length": 200}
    options |= {"max_steps": given.steps, "learning_rate": 1e-6, "bf16": False}
    rows = [{"prompt": f"What is {i} plus {i * 7 % 13}?"} for i in range(64)]
    config = GRPOConfig(**options)
    return GRPOTrainer(
        model, by_last, config, Dataset.from_list(rows), processing_class=tiny_tokenizer(), callbacks=[clock]
    )


def by_last(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A dense reward, so that no group is without signal."""
    return [ids[-1] / 4096 for ids in completion_ids]


def table(found: Found) -> str:
    step = found["step"]
    lines = ["| part | once, median | longest | times in 100 steps | share of a step |", "|---|--:|--:|--:|--:|"]
    total = 0.0
    for part in PARTS:
        if part not in found["parts"]:
            continue
        one = found["parts"][part]
        often = one["times"] / found["steps"]
        share = one["mean"] * often / step
        total += share
        lines.append(
            f"| {part} | {1e3 * one['median']:.2f} ms | {1e3 * one['longest']:.1f} ms | {100 * often:.0f} | {100 * share:.2f}% |"
        )
    lines.append(f"| all of it, of a step of {1e3 * step:.0f} ms | | | | {100 * total:.2f}% |")
    per_step = found["line_bytes"] + found["rollout_bytes"] / max(found["every"], 1)
    said = (
        f"{found['line_bytes']:.0f} bytes a line of metrics, {found['rollout_bytes'] / 1e3:.1f} kB a file of rollouts"
    )
    return "\n".join(lines) + f"\n\n{said}: {per_step / 1e3:.1f} kB a step with rollouts every {found['every']} steps."


if __name__ == "__main__":
    main()
