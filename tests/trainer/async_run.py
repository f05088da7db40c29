"""A small run whose rollouts run ahead, as a process that tests kill: `python async_run.py FOLDER STEPS OPTIONS(JSON)`."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
from covey import GRPOConfig, GRPOTrainer
from kit import tiny_model, tiny_tokenizer


def reward(completions: list[str], **columns: Any) -> list[float]:
    assert all(columns["answer"]), "a column of the data set is missing"
    return [hashlib.sha256(text.encode()).digest()[0] / 256 for text in completions]


def trainer(
    folder: Path, steps: int, tools: Any = None, evaluates: bool = False, ensemble: Any = None, **options: Any
) -> GRPOTrainer:
    given = {
        "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 12, "learning_rate": 1e-2, "report_to": "none", "disable_tqdm": True,
        "logging_steps": 1, "rollout_log_steps": 1, "save_steps": 3, "bf16": False, "gradient_checkpointing": False,
        "async_rollouts": True, "rollout_dtype": "float32",
    }  # fmt: skip
    rows = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(2 * steps)]
    return GRPOTrainer(
        model=tiny_model(), processing_class=tiny_tokenizer(), reward_funcs=reward,
        args=GRPOConfig(**given | options), train_dataset=Dataset.from_list(rows), tools=tools, ensemble=ensemble,
        eval_dataset=Dataset.from_list(rows[:3]) if evaluates else None,
    )  # fmt: skip


def digest(model: torch.nn.Module) -> str:
    """Of all weights."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def prompts_by_step(folder: Path) -> list[list[str]]:
    """What each step was trained on, from the run folder."""
    import pyarrow.parquet as parquet

    files = sorted((folder / "rollouts").glob("*.parquet"))
    return [sorted(set(map(str, parquet.read_table(file)["prompt"].to_pylist()))) for file in files]


if __name__ == "__main__":
    torch.set_num_threads(1)
    made = trainer(Path(sys.argv[1]), int(sys.argv[2]), **json.loads(sys.argv[3]))
    made.train(resume_from_checkpoint="auto")
    sys.stdout.write(f"digest {digest(made.model)}\n")
