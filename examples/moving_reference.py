"""Reference synchronisation (TR-DPO): the KL's reference follows the policy, and steadies each step without tying the run to its start.

    python examples/moving_reference.py --smoke      # seconds on one core; without --smoke 100 steps each

A real model: `MODEL = "Qwen/Qwen2.5-0.5B-Instruct"`, `ref_model_sync_steps=512`.
Expect: the reward rises in both. The KL to the reference that stands still grows, and with it the force that holds the policy back;
to the one that takes 0.6 of the policy every 4 steps it stays small. (Gorbatovski et al. 2024, arXiv 2404.09656.)
"""

from tiny import is_smoke, problems

from covey import GRPOConfig, GRPOTrainer

MODEL = "demo"

smoke = is_smoke(__doc__)
for name, is_moving in (("still", False), ("moving", True)):
    trainer = GRPOTrainer(
        model=MODEL,
        reward_funcs="math",
        args=GRPOConfig(
            output_dir=f"runs/reference-{name}",
            beta=1.0,  # strength of the KL
            sync_ref_model=is_moving,
            ref_model_mixup_alpha=0.6,
            ref_model_sync_steps=4,
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
