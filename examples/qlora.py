"""QLoRA: an adapter on a model whose weights are kept in 4 bits, a quarter of the memory.

    python examples/qlora.py --smoke      # seconds on one core: without a GPU the same adapter on plain weights
    python examples/qlora.py              # one GPU of 24 GB

Needs `pip install 'covey[peft,8bit]'`. A real model: `MODEL`, which is one without --smoke; a smaller one is "Qwen/Qwen2.5-1.5B-Instruct".
Expect: the reward rises. The 4-bit kernels of bitsandbytes are trained through on a GPU only; on a CPU Covey refuses them.
"""

import covey  # noqa: F401  # isort: skip  # before torch: docs/performance.md, threads

import torch
from peft import LoraConfig
from tiny import is_smoke, problems
from transformers import BitsAndBytesConfig

from covey import GRPOConfig, GRPOTrainer

smoke = is_smoke(__doc__)
MODEL = "demo" if smoke else "Qwen/Qwen2.5-7B-Instruct"
FOUR_BITS = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)

trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs="math",
    quantization_config=FOUR_BITS if torch.cuda.is_available() else None,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    args=GRPOConfig(
        output_dir="runs/qlora",
        optim="adamw_torch" if smoke else "paged_adamw_8bit",
        max_steps=12 if smoke else 200,
        num_generations=8,
        per_device_train_batch_size=64,
        max_completion_length=32 if smoke else 512,
        learning_rate=2e-3 if smoke else 1e-5,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=problems(),
)
trainer.train()
