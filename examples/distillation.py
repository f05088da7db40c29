"""Distillation: a student learns its teacher's distribution on its own completions. No reward is paid, only measured.

    python examples/distillation.py --smoke      # 20 s on one core; without --smoke 100 steps

A real model: `STUDENT = "Qwen/Qwen2.5-0.5B-Instruct"`, `teacher = "Qwen/Qwen2.5-7B-Instruct"`.
Expect: `distill/reverse_kl`, nats a token from the teacher, falls, and the share of right answers rises with it.
"""

import sys

from datasets import Dataset
from tiny import problems

from covey import GRPOConfig, GRPOTrainer, SFTTrainer, demo, sft_config
from covey import algorithms as alg
from covey.demo.task import worked

STUDENT = "demo"
smoke = "--smoke" in sys.argv


def make_teacher(folder):
    """The model that ships, after supervised fine-tuning on right answers."""
    rows = [
        {
            "prompt": [{"role": "user", "content": one.question}],
            "completion": [{"role": "assistant", "content": worked(one)}],
        }
        for one in demo.problems("train", 2000)
    ]
    args = sft_config(
        output_dir=folder, max_steps=50, per_device_train_batch_size=16, learning_rate=1e-3, report_to="none"
    )
    trainer = SFTTrainer("demo", args, Dataset.from_list(rows))
    trainer.train()
    trainer.save_model(f"{folder}/model")
    return f"{folder}/model"


teacher = make_teacher("runs/teacher")
trainer = GRPOTrainer(
    model=STUDENT,
    reward_funcs="math",
    algorithm=alg.dapo().replace(
        objective=alg.zero, regularizers=(alg.distill(teacher),)
    ),  # alg.dapo() alone: reward and teacher
    args=GRPOConfig(
        output_dir="runs/student",
        max_steps=12 if smoke else 100,
        num_generations=4,
        per_device_train_batch_size=64,
        max_completion_length=32,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=problems(),
)
trainer.train()
