"""Runs with one planted cause each: the demo model, two to fourteen real steps, every step recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey.demo import reward, rows

STEPS = 5
STEPS_OF_SLICES = 14
"""A fifth of eight groups a step, of which about half have signal: two dozen groups in all."""
SOURCES = ("web", "book", "test", "chat", "forum")
"""Every fifth prompt is of one source; what they say does not depend on it."""


def made(out: Path, seed: int, rewards: list[Any] | None = None, peft_config: Any = None, **options: Any) -> int:
    """Train, and return the last step."""
    chosen: dict[str, Any] = {
        **{"max_steps": STEPS, "save_steps": 1, "rollout_log_steps": 1, "per_device_train_batch_size": 64},
        **{"num_generations": 8, "max_completion_length": 32, "learning_rate": 3e-4, "lr_scheduler_type": "constant"},
        **{"seed": seed, "disable_tqdm": True, "report_to": "none", "use_cpu": True},
        **options,
    }
    args = GRPOConfig(output_dir=str(out), **chosen)
    data = [{**row, "source": SOURCES[i % len(SOURCES)]} for i, row in enumerate(rows("train", 256, seed))]
    GRPOTrainer("demo", rewards or [reward], args, Dataset.from_list(data), peft_config=peft_config).train()
    return int(chosen["max_steps"])


def healthy(out: Path, seed: int, steps: int = STEPS) -> int:
    return made(out, seed, max_steps=steps)


def two_healthy_rewards(out: Path, seed: int) -> int:
    return made(out, seed, [reward, shows_work])


def rate(out: Path, seed: int) -> int:
    """A learning rate at which the demo model breaks."""
    return made(out, seed, max_steps=2, learning_rate=4e-3)


def reward_bug(out: Path, seed: int) -> int:
    """A second reward with its sign turned: it takes away for what is right."""
    return made(out, seed, [reward, wrong_sign], max_steps=3)


def stale(out: Path, seed: int) -> int:
    """Half of the last step's batch is what the first step's weights wrote, as a queue that hands out old rollouts."""
    step = made(out, seed, max_steps=6, learning_rate=1.5e-3)
    old, new = (pq.read_table(out / "rollouts" / f"step-{n:06d}.parquet") for n in (1, step))
    half = new.num_rows // 2
    names = [name for name in new.column_names if name in old.column_names]
    mixed = pa.concat_tables([old.select(names).slice(0, half), new.select(names).slice(half)])
    pq.write_table(mixed, out / "rollouts" / f"step-{step:06d}.parquet")
    return step


def poisoned_slice(out: Path, seed: int) -> int:
    """One source pays for wrong answers instead of right ones, from the first step on."""
    return _last_with(out, "web", made(out, seed, [pays_wrong_answers], max_steps=STEPS_OF_SLICES))


def outsized_group(out: Path, seed: int) -> int:
    """One source pays a hundred times as much, and advantages are divided by the deviation of the whole step."""
    return _last_with(out, "web", made(out, seed, [pays_a_hundred_times], scale_rewards="batch"))


def _last_with(out: Path, source: str, last: int) -> int:
    """The last step in which a group of the source has signal."""
    for step in range(last, 0, -1):
        held = pq.read_table(
            out / "rollouts" / f"step-{step:06d}.parquet", columns=["columns", "advantage"]
        ).to_pylist()
        if any(json.loads(row["columns"])["source"] == source and row["advantage"] for row in held):
            return step
    raise AssertionError(f"no step with a group of {source} that has signal")


def pays_wrong_answers(completions: Any, answer: Any, source: Any, **columns: Any) -> list[float]:
    return [1 - one if of == "web" else one for one, of in zip(reward(completions, answer), source, strict=True)]


def pays_a_hundred_times(completions: Any, answer: Any, source: Any, **columns: Any) -> list[float]:
    return [one * (100 if of == "web" else 1) for one, of in zip(reward(completions, answer), source, strict=True)]


def wrong_sign(completions: Any, answer: Any, **columns: Any) -> list[float]:
    return [-3.0 * one for one in reward(completions, answer)]


def shows_work(completions: Any, **columns: Any) -> list[float]:
    return [float("=" in str(one)) for one in completions]


PLANTED = {
    "learning_rate": rate,
    "reward": reward_bug,
    "stale": stale,
    "slice": poisoned_slice,
    "group": outsized_group,
}
"""The kind of change that should be named first, and the run."""
