"""How long training stands still for a checkpoint, with the disk written beside the next steps and with the run waiting for it.

    python benchmarks/saving.py --size 60m --steps 12 --every 2

One model with random weights trains full AdamW (12 bytes a parameter in a checkpoint) on short prompts; almost no answer ends early, so steps are alike.
The ways take turns, each in its own run from the same start. The pause is the time inside the save call on the training thread, medians over the saves;
"a step" is the median of all the time from the end of one step to the end of the next, saves included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from covey import GRPOConfig, GRPOTrainer
from covey.training import saving

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from kit import tiny_tokenizer
from rollout import SHAPES

WAYS: dict[str, dict[str, Any]] = {
    "no saves": {"save_strategy": "no"},
    "wait for the disk": {"save_async": False},
    "beside the steps": {},
}
Found = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="10m")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=2, help="steps between saves")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (None: the temporary folder)")
    parser.add_argument("--out", type=Path, default=Path("out"))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, list[Found]] = {way: [] for way in WAYS}
    for _ in range(given.repeats):
        for way, changed in WAYS.items():
            found[way].append(measure(given, changed))
            print(f"{way}: {found[way][-1]['wall']:.1f} s", flush=True)
    print(table(found), flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "saving.json").write_text(json.dumps(found, indent=1))


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def measure(given: argparse.Namespace, changed: Found) -> Found:
    """One run: the pauses of its saves, and the times of its steps."""
    pauses: list[float] = []
    save = saving.Saver.save

    def timed(self: saving.Saver, *given: Any) -> None:
        started = time.perf_counter()
        save(self, *given)
        pauses.append(time.perf_counter() - started)

    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        clock = Clock()
        one = trainer(given, folder, clock, changed)
        saving.Saver.save = timed  # type: ignore[method-assign,assignment]
        started = time.perf_counter()
        try:
            one.train()
        finally:
            saving.Saver.save = save  # type: ignore[method-assign]
        wall = time.perf_counter() - started
        newest = Path(folder) / f"checkpoint-{given.steps}"
        size = sum(path.stat().st_size for path in newest.iterdir()) if newest.exists() else 0
    steps = [end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)]
    return {"pauses": pauses[1:], "steps": steps[1:], "wall": wall, "bytes": size}  # the first ones warm up


def trainer(given: argparse.Namespace, folder: str, clock: Clock, changed: Found) -> GRPOTrainer:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**shape, **SHAPES[given.size], eos_token_id=1, pad_token_id=0))
    options = {
        "output_dir": folder,
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "max_completion_length": given.tokens,
        "max_steps": given.steps,
        "save_strategy": "steps",
        "save_steps": given.every,
        "save_total_limit": 2,
        "learning_rate": 1e-6,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }
    rows = Dataset.from_list([{"prompt": f"What is {i} plus {i * 7 % 13}?"} for i in range(64)])
    return GRPOTrainer(
        model,
        most_frequent,
        GRPOConfig(**{**options, **changed}),
        rows,
        processing_class=tiny_tokenizer(),
        callbacks=[clock],
    )


def most_frequent(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A dense reward: how often the most frequent token occurs, and a little by the last token."""
    return [Counter(ids).most_common(1)[0][1] + ids[-1] / 4096 for ids in completion_ids]


def table(found: dict[str, list[Found]]) -> str:
    plain = statistics.median(s for run in found["no saves"] for s in run["steps"])
    lines = [
        "| way | pause of a save, median | longest | share of a step | a step, saves included, mean | checkpoint |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for way, runs in found.items():
        pauses = [s for run in runs for s in run["pauses"]]
        mean = statistics.mean(s for run in runs for s in run["steps"])
        if not pauses:
            lines.append(f"| {way} | | | | {mean:.2f} s | |")
            continue
        middle, longest, size = statistics.median(pauses), max(pauses), runs[-1]["bytes"] / 1e6
        lines.append(
            f"| {way} | {1e3 * middle:.0f} ms | {1e3 * longest:.0f} ms | {100 * middle / plain:.1f}% | {mean:.2f} s | {size:.0f} MB |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
