"""Mathematics: word problems with verified answers. GRPO in its plainest form.

    python examples/maths.py --smoke      # seconds on one core; without --smoke 100 steps

A real model: `MODEL = "Qwen/Qwen2.5-0.5B-Instruct"`. gsm8k.yaml beside this file trains one on GSM8K.
Expect: the model that ships calculates well and misreads half of these problems; the share of right answers rises.
"""

from tiny import is_smoke, problems

from covey import GRPOConfig, GRPOTrainer

MODEL = "demo"

smoke = is_smoke(__doc__)
trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=["math", "format"],  # the number is right; the answer ends with "#### <number>"
    args=GRPOConfig(
        output_dir="runs/maths",
        reward_weights=[1.0, 0.2],
        max_steps=12 if smoke else 100,
        num_generations=8,
        per_device_train_batch_size=64,
        max_completion_length=32,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=problems(),  # columns: prompt, a list of messages, and answer, which reaches the rewards
)
trainer.train()
