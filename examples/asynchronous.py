"""Asynchronous rollouts: another process writes the next completions while the learner learns from these.

    python examples/asynchronous.py --smoke      # seconds on one core; without --smoke 100 steps

A real model: `MODEL = "Qwen/Qwen2.5-0.5B-Instruct"`, and `rollout_device="cuda:1"` where there is a second GPU.
Expect: the reward rises as without it. `staleness/mean` is 1 after the first step: each token is one update older than the weights
that learn from it, which importance weights correct. `idle/learner` and `idle/sampler` say who waits for whom.
"""

from tiny import is_smoke, problems

from covey import GRPOConfig, GRPOTrainer

MODEL = "demo"


def main():
    smoke = is_smoke(__doc__)
    trainer = GRPOTrainer(
        model=MODEL,
        reward_funcs="math",
        args=GRPOConfig(
            output_dir="runs/asynchronous",
            async_rollouts=True,
            max_staleness=1,
            max_steps=12 if smoke else 100,
            num_generations=8,
            per_device_train_batch_size=64,
            max_completion_length=32,
            learning_rate=1e-3,
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=problems(),
    )
    trainer.train()


if __name__ == "__main__":  # the other process imports this file
    main()
