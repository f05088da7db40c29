"""PPO beside GRPO: the same model, data, reward and budget, with a critic and without one.

    python examples/ppo_beside_grpo.py --smoke      # seconds on one core; without --smoke 100 steps each

A real model: `MODEL = "Qwen/Qwen2.5-0.5B-Instruct"`.
Expect: both rewards rise. PPO also logs `value_loss` and `values/explained_variance`: the critic starts from nothing, and until it
explains the rewards PPO learns more slowly. docs/algorithms-measured.md compares every algorithm over seeds.
"""

from tiny import is_smoke, problems

from covey import GRPOConfig, GRPOTrainer

MODEL = "demo"

smoke = is_smoke(__doc__)
for name in ("grpo", "ppo"):
    trainer = GRPOTrainer(
        model=MODEL,
        reward_funcs="math",
        algorithm=name,  # or "ppo, critic_model=separate": a second model as critic
        args=GRPOConfig(
            output_dir=f"runs/beside-{name}",
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

print("compare: covey plot runs/beside-grpo runs/beside-ppo -o beside.html")
