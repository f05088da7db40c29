"""Tool use: a model that guesses learns to look things up, because right answers alone are paid.

    python examples/tools.py --smoke      # seconds on one core; without --smoke 60 steps

A real model: `model = "Qwen/Qwen2.5-0.5B-Instruct"`, whose chat template has tools. docs/tools.md: environments, MCP, limits of a tool.
Expect: the tiny model was taught to call the tool in one answer of six and to guess otherwise. `tools/call_frequency` and the reward rise.
"""

import random

from datasets import Dataset
from tiny import is_smoke, taught

from covey import GRPOConfig, GRPOTrainer

rng = random.Random(0)
THINGS = ["lamp", "chair", "table", "clock", "rope", "ladder", "bucket", "hammer"]
SHELVES = [f"{row}{place}" for row in "ABCDEF" for place in range(1, 10)]
STORE = dict(zip(THINGS, rng.sample(SHELVES, len(THINGS)), strict=True))


def shelf_of(thing: str) -> str:
    """Look up on which shelf of the store a thing is.

    Args:
        thing: Name of the thing, such as lamp.
    """
    return STORE[thing]


def row(rng):
    """What the tiny model is taught: to read the tool's answer out, to call the tool when told to, and else mostly to guess."""
    thing, shelf, kind = rng.choice(THINGS), rng.choice(SHELVES), rng.random()
    question = {"role": "user", "content": f"On which shelf is the {thing}?"}
    call = {"type": "function", "function": {"name": "shelf_of", "arguments": {"thing": thing}}}
    said = f'<tool_call>{{"name": "shelf_of", "arguments": {{"thing": "{thing}"}}}}</tool_call>'
    if kind < 0.3:
        turns = [
            question,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": shelf},
        ]
        return {"prompt": turns, "completion": shelf}
    if kind < 0.7:
        question["content"] += " Look it up."
    return {"prompt": [question], "completion": said if kind < 0.75 else shelf}


def right(completions, thing, **columns):
    """1 if the last message is the shelf. A completion is a list of messages: the model's and the tool's."""
    return [float(one[-1]["content"] == STORE[name]) for one, name in zip(completions, thing, strict=True)]


smoke = is_smoke(__doc__)
questions = [
    {"prompt": [{"role": "user", "content": f"On which shelf is the {thing}?"}], "thing": thing} for thing in THINGS
]
trainer = GRPOTrainer(
    model=taught("runs/tools-start", row, steps=150),
    reward_funcs=right,
    args=GRPOConfig(
        output_dir="runs/tools",
        max_steps=15 if smoke else 60,
        num_generations=8,
        per_device_train_batch_size=64,
        max_completion_length=64,
        max_tool_calling_iterations=2,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=Dataset.from_list(questions),
    tools=[shelf_of],
)
trainer.train()
