"""The demo: a small model that ships with Covey, its task, and the script that made it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covey.demo.task import HELD_OUT, problems, reward, rows

__all__ = ["DEMO_SETTINGS", "HELD_OUT", "model_path", "problems", "reward", "rows"]

DEMO_SETTINGS: Mapping[str, Any] = {
    "learning_rate": 6e-4,
    "lr_scheduler_type": "linear",
    "warmup_steps": 5,
    "per_device_train_batch_size": 128,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "max_steps": 100,
    "max_completion_length": 32,
    "temperature": 1.0,
    "max_grad_norm": 1.0,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_steps": 50,
    "save_total_limit": 2,
    "rollout_log_steps": 10,
}
"""Options of the demo's run: 16 prompts x 8 completions a step."""


def model_path() -> Path:
    """The folder of the shipped model: Qwen2, about a million parameters, made by `covey.demo.make_model`."""
    return Path(__file__).parent / "model"
