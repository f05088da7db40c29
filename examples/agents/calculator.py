"""GRPO on an unmodified agent with a calculator: a model that guesses products learns to call the tool, from the answers' rewards alone.

    python examples/agents/calculator.py --smoke      # half a minute on one core; without --smoke six

The shipped model is first taught to call the tool rarely (into `FOLDER/warm`, once), then trained through the run's own endpoint. `main`
is the agent; `covey train --agent calculator.py:main` trains it too. A real model: `model = "Qwen/Qwen2.5-0.5B-Instruct"`.
Expect: of 200 products that were not trained on it calls the tool for one in twenty before and for three in four after, and a
quarter of its answers are right, after one in fifty. The smoke shows that everything runs; teaching the calls alone takes four minutes, so
its reward does not rise.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from warm_up import STEPS, TOOL, warm_up

from covey import GRPOConfig, GRPOTrainer

HELD_OUT = 2
"""Seed of the rows that are not trained on."""


def calc(x: str) -> str:
    """A product such as `12*34`; what is none gives an error, as a tool's answer."""
    try:
        a, b = x.split("*")
        return str(int(a) * int(b))
    except (ValueError, AttributeError):
        return json.dumps({"error": f"{x!r} is no product"})


def main(row: dict[str, Any], client: Any, model: str) -> dict[str, Any]:
    """Ask; run the calls of tools; read the answer. Nothing here knows of training."""
    messages, num_calls = list(row["prompt"]), 0
    for _ in range(3):
        said = (
            client.chat.completions.create(model=model, messages=messages, tools=[TOOL], max_tokens=96)
            .choices[0]
            .message
        )
        if not said.tool_calls:
            break
        num_calls += len(said.tool_calls)
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            x = json.loads(call.function.arguments).get("x")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calc(x)})
    right = (said.content or "").strip() == row["answer"]
    return {"score": float(right), "called": num_calls > 0}


def called(called: list[bool], **columns: Any) -> list[float]:
    """Watched, not trained on: its weight is 0."""
    return [float(one) for one in called]


def rows(count: int, seed: int) -> Dataset:
    """Products of two numbers of one digit; those whose numbers differ by 0 or 3 are never trained on."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        if (abs(a - b) in (0, 3)) == (seed == HELD_OUT):
            found.append({"prompt": [{"role": "user", "content": f"{a} times {b}?"}], "answer": str(a * b)})
    return Dataset.from_list(found)


def share(value: float, count: int) -> str:
    """A share of `count` questions with its 95% interval (Wilson)."""
    z = 1.96
    middle = (value + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (value * (1 - value) / count + z * z / (4 * count * count)) ** 0.5
    return f"{value:.1%} (95% {max(0.0, middle - half):.1%} to {min(1.0, middle + half):.1%})"


def train(folder: Path, is_smoke: bool, seed: int, agent: Callable[..., Any] = main, name: str = "grpo") -> None:
    """Train the warmed-up model on the agent's calls, in `folder/name-SEED`, with an evaluation before and after."""
    started, count = time.process_time(), 8 if is_smoke else 200
    if not (folder / "warm" / "config.json").exists():
        warm_up("calculator", folder / "warm", 4 if is_smoke else STEPS["calculator"])
    warmed = time.process_time()
    args = GRPOConfig(
        output_dir=str(folder / f"{name}-{seed}"),
        max_steps=2 if is_smoke else 30,
        per_device_train_batch_size=16 if is_smoke else 64,
        per_device_eval_batch_size=64,
        num_generations=16,
        num_generations_eval=1,
        max_completion_length=192,
        learning_rate=2e-4,
        seed=seed,
        reward_weights=[0.0],  # of `called`; the agent's own score has 1
        save_strategy="no",
        logging_steps=5,
        report_to="none",
        bf16=False,
        use_cpu=True,
    )
    model = str(folder / "warm")
    trainer = GRPOTrainer(model, called, args, rows(32 if is_smoke else 2000, 1), rows(count, HELD_OUT), agent=agent)
    for when in ("before", "after"):
        found = trainer.evaluate()
        calls, right = (found[f"eval_rewards/{name}/mean"] for name in ("called", "main"))
        print(f"{when}: calls the tool {share(calls, count)}, right {share(right, count)}", flush=True)
        if when == "before":
            trainer.train()
    seconds = time.process_time() - started
    print(f"CPU minutes: {seconds / 60:.1f}, of them {(warmed - started) / 60:.1f} to warm up")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/calculator"))
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that everything works")
    given = parser.parse_args()
    train(given.folder, given.smoke, given.seed)
