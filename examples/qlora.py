"""QLoRA: an adapter on a model whose weights are kept in 4 bits, a quarter of the memory.

    python examples/qlora.py            # one GPU of 24 GB
    python examples/qlora.py --smoke    # without a GPU it trains the same adapter on plain weights

Needs `pip install 'covey[peft,8bit]'`. A smaller model: `MODEL = "Qwen/Qwen2.5-1.5B-Instruct"`.
Expect: the reward rises. The 4-bit kernels of bitsandbytes are trained through on a GPU only; on a CPU Covey refuses them.
"""

import sys

import torch
from peft import LoraConfig
from tiny import problems
from transformers import BitsAndBytesConfig

from covey import GRPOConfig, GRPOTrainer

smoke = "--smoke" in sys.argv
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
