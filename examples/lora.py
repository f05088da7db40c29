"""LoRA on one GPU: a small adapter is trained, the model stays as it is and serves as its own reference.

    python examples/lora.py --smoke      # seconds on one core; without --smoke 100 steps

A real model: `MODEL = "Qwen/Qwen2.5-7B-Instruct"`, `model_init_kwargs={"dtype": "bfloat16"}` (its 28 GB of float32 weights become 14) and
`learning_rate=1e-5`, on one GPU of 24 GB: 16.0 GiB of an L4's 21.0 by calculation, for 8 completions of 512 tokens (`covey doctor plan`).
Needs `pip install 'covey[peft]'`.
Expect: the reward rises. runs/lora/adapter holds the adapter alone; `covey merge runs/lora/adapter -o merged` adds it into the model.
"""

import covey  # noqa: F401  # isort: skip  # before torch: docs/performance.md, threads

from peft import LoraConfig
from tiny import is_smoke, problems

from covey import GRPOConfig, GRPOTrainer

MODEL = "demo"

smoke = is_smoke(__doc__)
trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs="math",
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    args=GRPOConfig(
        output_dir="runs/lora",
        beta=0.01,  # costs no second model: the reference is the policy with its adapter off
        max_steps=12 if smoke else 100,
        num_generations=8,
        per_device_train_batch_size=64,
        max_completion_length=32,
        learning_rate=2e-3,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=problems(),
)
trainer.train()
trainer.save_model("runs/lora/adapter")
