"""Forgetting with and without replay: a stream whose task changes half-way, and a fixed set of the first task.

    python benchmarks/forgetting.py --seeds 3

The tiny model of examples/languages, which misreads many word problems, is trained on English ones that take away or multiply, then on ones
that add. `eval_first_forgetting` is what it lost of the first task since its best evaluation; `covey compare` pairs the runs question
by question at the last step. Both runs have as many steps, half of them before the change.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey.cli import main as covey
from covey.data import follow

sys.path.extend(str(Path(__file__).parents[1] / "examples" / name) for name in (".", "languages"))
import task
import tiny

PROMPTS, GENERATIONS = 16, 6
TASKS = {"first": "-*", "second": "+"}
"""The signs that a task's questions need."""


def rows(split: str, name: str, count: int) -> list[dict[str, Any]]:
    """Rows of one of the two tasks."""
    found = [one for one in task.drawn(split, 5 * count) if task.SIGNS[one.kind] in TASKS[name]][:count]
    return [{"prompt": one.asked("en"), "answer": one.answer} for one in found]


def stream(before: int, after: int) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows("train", "first", before) + rows("train", "second", after)):
        yield {**row, "id": number}  # equal questions are asked again


def trained(model: str, folder: Path, share: float, seed: int, steps: int) -> GRPOTrainer:
    """The finished run. `share`: that of replays; 0 for none."""
    args = GRPOConfig(
        str(folder), seed=seed, max_steps=steps, num_generations=GENERATIONS, num_generations_eval=1,
        per_device_train_batch_size=PROMPTS * GENERATIONS, per_device_eval_batch_size=200, max_completion_length=12,
        learning_rate=1e-3, lr_scheduler_type="constant", curriculum=f"replay:{share}" if share else "none",
        eval_on_start=True, eval_strategy="steps", eval_steps=steps // 2, save_strategy="no", logging_steps=1,
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    fresh = int(PROMPTS * steps * (1 - share)) // 2
    held_out = {name: Dataset.from_list(rows("test", name, 200)) for name in TASKS}
    trainer = GRPOTrainer(model, "math", args, follow(stream(fresh, 2 * PROMPTS * steps)), held_out)
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--out", type=Path, default=Path("runs/forgetting"))
    given = parser.parse_args()
    model = tiny.taught(str(given.out / "start"), task.taught, steps=300)
    print("| run | seed | first task: start, change, end | second task | forgotten of the first (95%) | CPU s |")
    print("|---|--:|---|---|---|--:|")
    for seed in range(given.seeds):
        for name, share in (("plain", 0.0), ("replay", given.share)):
            started = time.process_time()
            history = trained(model, given.out / f"{name}-{seed}", share, seed, given.steps).state.log_history
            seconds = time.process_time() - started
            values = {
                one: [entry[f"eval_{one}_reward"] for entry in history if f"eval_{one}_reward" in entry]
                for one in TASKS
            }
            curves = [", ".join(f"{values[one][i]:.0%}" for i in (0, len(values[one]) // 2, -1)) for one in TASKS]
            last = [entry for entry in history if "eval_first_forgetting" in entry][-1]
            lost, low, high = (last[f"eval_first_forgetting{end}"] for end in ("", "/low", "/high"))
            print(
                f"| {name} | {seed} | {curves[0]} | {curves[1]} | {lost:.0%} ({low:.0%} to {high:.0%}) | {seconds:.0f} |",
                flush=True,
            )
    sides = [",".join(str(given.out / f"{name}-{seed}") for seed in range(given.seeds)) for name in ("plain", "replay")]
    for name in TASKS:
        covey(["compare", *sides, "--set", f"eval_{name}"])


if __name__ == "__main__":
    main()
