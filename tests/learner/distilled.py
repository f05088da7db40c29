"""Rows of a distillation, and a training step on them."""

import torch
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey.learner.packing import Row
from covey.types import Completion, Prompt
from kit import tiny_model, tiny_tokenizer


def row(group, prompt, completion, hint=None):
    ids = torch.tensor(completion)
    return Row(
        prompt=Prompt(uid=f"0:{group}", token_ids=tuple(prompt)),
        completion=Completion(token_ids=ids, text="", finish="stop"),
        group=group,
        advantage=torch.zeros(()),
        counts=torch.ones(len(ids), dtype=torch.bool),
        hint=hint,
    )


ROWS = [row(0, [5, 6, 7], [9, 10, 11]), row(0, [5, 6, 7], [15]), row(1, [8, 9], [20, 21])]


def trained(tmp_path, algorithm, **options):
    trainer = trainer_of(tmp_path, algorithm, **options)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def trainer_of(tmp_path, algorithm, **options):
    defaults = {"save_strategy": "no", "per_device_train_batch_size": 8, "max_steps": 6, "max_completion_length": 6}
    args = GRPOConfig(
        output_dir=str(tmp_path), learning_rate=1e-2, logging_steps=1, report_to="none",  disable_tqdm=True, temperature=1.0,
        **{**defaults, **options},
    )  # fmt: skip
    return GRPOTrainer(
        model=tiny_model("qwen2"), reward_funcs=lambda completions, **columns: [float(len(c)) for c in completions], args=args,
        train_dataset=Dataset.from_list([{"prompt": "Tom has 3 apples.", "solution": "He has 3."}] * 4),
        processing_class=tiny_tokenizer(), algorithm=algorithm,
    )  # fmt: skip
