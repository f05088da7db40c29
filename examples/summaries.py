"""Summaries that are faithful and short: overlap with a reference, and a price for every sentence beyond the first.

    python examples/summaries.py --smoke      # seconds on one core; without --smoke 200 steps

A real model: `model = "Qwen/Qwen2.5-0.5B-Instruct"`, and rows of yours with the columns `prompt` and `summary`.
Expect: the tiny model was taught to summarize badly (another text, or too much of this one). ROUGE rises and the length falls.
"""

import random

from datasets import Dataset
from tiny import is_smoke, taught

from covey import GRPOConfig, GRPOTrainer

WHO, DID = ["Anna", "The farmer", "The teacher", "Omar"], ["bought", "sold", "painted", "lost"]
WHAT, WHERE = ["a red car", "an old boat", "two horses", "a piano"], ["in Rome", "in Oslo", "near the river", "at home"]
ASIDES = ["It rained all day.", "Many people came to look.", "Nobody had expected it.", "The radio spoke of it."]


def row(rng):
    """A report of three sentences. The tiny model learns from `completion`; the rewards read `summary`."""
    who, did, what, where = (rng.choice(words) for words in (WHO, DID, WHAT, WHERE))
    sentences = rng.sample([f"{who} {did} {what} {where}.", *rng.sample(ASIDES, 2)], 3)
    right = f"{who} {did} {what}."
    return {
        "prompt": [{"role": "user", "content": f"Summarize: {' '.join(sentences)}"}],
        "summary": right,
        "completion": rng.choice([right, rng.choice(sentences), f"{right} {rng.choice(ASIDES)}"]),
    }


def brief(completions, **columns):
    """1 for one sentence, less for more."""
    return [1 / max(1, one[0]["content"].count(".")) for one in completions]


smoke, rng = is_smoke(__doc__), random.Random(1)
trainer = GRPOTrainer(
    model=taught("runs/summaries-start", row),
    reward_funcs=["rouge(kind='L', max_ratio=1.5)", brief],
    args=GRPOConfig(
        output_dir="runs/summaries",
        reward_weights=[1.0, 0.2],
        max_steps=20 if smoke else 200,
        num_generations=8,
        per_device_train_batch_size=64,
        max_completion_length=24,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=Dataset.from_list([row(rng) for _ in range(1000)]),
)
trainer.train()
