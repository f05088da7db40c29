"""Structured output: JSON that satisfies a schema and holds the right values.

    python examples/structured_output.py --smoke      # seconds on one core; without --smoke 100 steps

A real model: `model = "Qwen/Qwen2.5-0.5B-Instruct"`, and the schema in the system prompt.
Expect: the tiny model was taught to drop keys, to write ages as text and to add remarks. Both rewards rise.
"""

import json
import random

from datasets import Dataset
from tiny import is_smoke, taught

from covey import GRPOConfig, GRPOTrainer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


def row(rng):
    """A sentence and its record. The tiny model learns from `completion`; the rewards read `record`."""
    record = {
        "name": rng.choice(["Anna", "Omar", "Mia", "Leo"]),
        "age": rng.randint(20, 69),
        "city": rng.choice(["Rome", "Oslo", "Lima"]),
    }
    text = f"{record['name']}, aged {record['age']}, lives in {record['city']}."
    habits = [record, {**record, "age": str(record["age"])}, {k: record[k] for k in rng.sample(list(record), 2)}]
    return {
        "prompt": [{"role": "user", "content": f"As JSON: {text}"}],
        "record": json.dumps(record),
        "completion": rng.choice(["", "", "Here it is: "]) + json.dumps(rng.choice(habits)),
    }


def right_values(completions, record, **columns):
    """The share of the record's values that the answer holds; 0 for what is no JSON object."""

    def share(text, wanted):
        try:
            found = json.loads(text)
        except ValueError:
            return 0.0
        return sum(isinstance(found, dict) and found.get(key) == value for key, value in wanted.items()) / len(wanted)

    return [share(one[0]["content"], json.loads(wanted)) for one, wanted in zip(completions, record, strict=True)]


smoke, rng = is_smoke(__doc__), random.Random(1)
trainer = GRPOTrainer(
    model=taught("runs/structured-start", row),
    reward_funcs=[f"json_schema(schema={SCHEMA})", right_values],
    args=GRPOConfig(
        output_dir="runs/structured",
        max_steps=15 if smoke else 100,
        num_generations=8,
        per_device_train_batch_size=64,
        max_completion_length=40,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=Dataset.from_list([row(rng) for _ in range(1000)]),
)
trainer.train()
