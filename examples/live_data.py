"""Live data: a file of prompts that grows while the run trains on it.

    python examples/live_data.py --smoke      # seconds on one core; without --smoke 100 steps

A real model: `MODEL = "Qwen/Qwen2.5-0.5B-Instruct"`, and a program of yours that writes the file; a folder or an HTTP queue do too.
Expect: the run waits for rows, trains on each once and on earlier ones again (a quarter), and the reward rises. Checkpoints
remember the place in the file. The metrics `prompts/drift_p/...` tell when prompts become others.
"""

import json
import threading
import time
from pathlib import Path

from tiny import is_smoke, problems

from covey import GRPOConfig, GRPOTrainer
from covey.data import follow

MODEL = "demo"
PROMPTS = Path("runs/live-prompts.jsonl")


def write(rows):
    """Another program, in real life: a prompt every 20 milliseconds."""
    with PROMPTS.open("w") as file:
        for number, row in enumerate(rows):
            print(json.dumps({**row, "id": number}), file=file, flush=True)
            time.sleep(0.02)


smoke = is_smoke(__doc__)
PROMPTS.parent.mkdir(exist_ok=True)
threading.Thread(target=write, args=(problems(),), daemon=True).start()
trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs="math",
    args=GRPOConfig(
        output_dir="runs/live",
        max_steps=16 if smoke else 100,  # a stream has no end
        curriculum="replay:0.25",
        live_timeout_seconds=60,
        num_generations=4,
        per_device_train_batch_size=64,
        max_completion_length=32,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=follow(PROMPTS),
)
trainer.train()
