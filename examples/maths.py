"""Mathematics: word problems with verified answers. GRPO in its plainest form.

    python examples/maths.py --smoke      # 10 s on one core; without --smoke 100 steps

A real model: `MODEL = "Qwen/Qwen2.5-0.5B-Instruct"`. gsm8k.yaml beside this file trains one on GSM8K.
Expect: the model that ships calculates well and misreads half of the problems; the share of right answers rises.
"""

import sys

from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer, demo

MODEL = "demo"
SYSTEM = None  # a real model: 'Think step by step. Put the final number after "####".'

smoke = "--smoke" in sys.argv
rows = demo.rows("train", 2000)  # columns: prompt, a list of messages, and answer, which reaches the rewards
if SYSTEM:
    rows = [{**row, "prompt": [{"role": "system", "content": SYSTEM}, *row["prompt"]]} for row in rows]

trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=["math", "format"],  # the number is right; the answer ends with "#### <number>"
    args=GRPOConfig(
        output_dir="runs/maths",
        reward_weights=[1.0, 0.2],
        max_steps=20 if smoke else 100,
        num_generations=8,
        per_device_train_batch_size=96,
        max_completion_length=32,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=Dataset.from_list(rows),
)
trainer.train()
