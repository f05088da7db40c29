"""A script written for TRL, with one import changed: python examples/trl_script.py [MODEL] [STEPS]

Without arguments it trains the model that ships with Covey, without network.
"""

import sys

from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer  # was: from trl import GRPOConfig, GRPOTrainer

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 20
dataset = Dataset.from_list([{"prompt": f"{a} + {b} ="} for a in range(2, 40) for b in range(2, 20)])


def reward_short(prompts, completions, **kwargs):
    """Twelve characters are best."""
    return [-abs(12 - len(completion)) for completion in completions]


trainer = GRPOTrainer(
    model=model,
    reward_funcs=reward_short,
    args=GRPOConfig(
        output_dir="runs/trl-script",
        max_steps=steps,
        num_generations=8,
        per_device_train_batch_size=32,
        max_completion_length=24,
        learning_rate=1e-4,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=dataset,
)
trainer.train()
rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
print(f"reward: {rewards[0]:.2f} at first, {rewards[-1]:.2f} at last")
