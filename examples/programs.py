"""Code: programs that are run against tests, in the sandbox.

    python examples/programs.py --smoke      # seconds on one core; without --smoke 100 steps

A real model: `model = "Qwen/Qwen2.5-Coder-0.5B-Instruct"`; mbpp.yaml beside this file trains one on MBPP.
Expect: the tiny model was taught to confuse the operators. The share of passed tests rises. `covey env` says whether this
machine can isolate programs.
"""

import random

from datasets import Dataset
from tiny import is_smoke, taught

from covey import GRPOConfig, GRPOTrainer

TASKS = {
    "double": "x * 2",
    "halve": "x / 2",
    "square": "x * x",
    "negate": "- x",
    "increment": "x + 1",
    "decrement": "x - 1",
}


def row(rng):
    """A task and its tests. The tiny model learns from `completion`; the reward reads `tests`."""
    name = rng.choice(list(TASKS))
    body = TASKS[rng.choice([name, rng.choice(list(TASKS))])]
    return {
        "prompt": [{"role": "user", "content": f"Write {name}(x)."}],
        "tests": [f"assert {name}({x}) == {eval(TASKS[name], {'x': x})}" for x in (3, 7)],
        "completion": f"def {name}(x):\n    return {body}\n",
    }


smoke, rng = is_smoke(__doc__), random.Random(1)
trainer = GRPOTrainer(
    model=taught("runs/programs-start", row),
    reward_funcs="code(timeout=5, partial=True)",  # partial: the share of tests that pass
    args=GRPOConfig(
        output_dir="runs/programs",
        max_steps=12 if smoke else 100,
        num_generations=8,
        per_device_train_batch_size=32,
        max_completion_length=24,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=Dataset.from_list([row(rng) for _ in range(1000)]),
)
trainer.train()
