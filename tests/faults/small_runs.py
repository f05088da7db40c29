"""Tiny real runs for tests that break them: a trainer, its weights, and ways to make its numbers bad from inside."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from covey import GRPOConfig, GRPOTrainer
from kit import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"Tom has {i} apples.", "answer": str(i)} for i in range(12)]


def reward_len(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """Longer is better, a little differently for every text."""
    return [len(c) + (hashlib.sha256(c.encode()).digest()[0] / 256) for c in completions]


def options(folder: Path, **changed: Any) -> GRPOConfig:
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "logging_steps": 2,
        "max_steps": 6,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "steps",
        "save_steps": 1,
        "rollout_log_steps": 0,
        "disable_tqdm": True,
    }
    return GRPOConfig(**{**given, **changed})


def trainer(folder: Path, **changed: Any) -> GRPOTrainer:
    """A trainer of a one-layer model; keywords of the trainer itself may be mixed with options."""
    own = {name: changed.pop(name) for name in list(changed) if name in _CONSTRUCTOR}
    given = {"model": None, "train_dataset": Dataset.from_list(ROWS), "reward_funcs": reward_len, **own}
    given["model"] = given["model"] or tiny_model("qwen2")
    return GRPOTrainer(args=options(folder, **changed), processing_class=tiny_tokenizer(), **given)


_CONSTRUCTOR = {"model", "train_dataset", "eval_dataset", "reward_funcs", "callbacks", "peft_config", "algorithm"}


def stopped(one: GRPOTrainer) -> BaseException:
    """Train until a signal stops it, as it must; what `train` raised then."""
    with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
        one.train()
    return caught.value


def weights(one: GRPOTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in one.model.parameters()])


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


class During(TrainerCallback):
    """Does something at the start of the given steps, and undoes it at their end."""

    def __init__(self, steps: Collection[int], start: Callable[[], None], stop: Callable[[], None]) -> None:
        self.steps, self.start, self.stop = list(steps), start, stop

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.steps and state.global_step + 1 == self.steps[0]:
            self.steps.pop(0)  # once each, also when the run goes back
            self.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop()


def spoil_gradient(one: GRPOTrainer, steps: Collection[int], factor: float) -> None:
    """Multiply one gradient by `factor` (NaN, infinity, 1e4) in these steps."""
    active: list[bool] = []
    parameter = next(p for p in one.model.parameters() if p.requires_grad)
    parameter.register_hook(lambda gradient: gradient * factor if active else gradient)
    one.add_callback(During(steps, lambda: active.append(True), active.clear))
