"""Creative writing: couplets that rhyme, without becoming one and the same couplet.

    python examples/creative_writing.py --smoke      # seconds on one core; without --smoke 150 steps

It trains twice: for the form alone, and for form and diversity. A real model: `model = "Qwen/Qwen2.5-0.5B-Instruct"`.
Expect: both learn to rhyme. Paid for the form alone, couplets become alike (`rewards/distinct/mean` falls, and the alert
`reward_hacking` says so); paid for both, they stay more diverse.
"""

import random

from datasets import Dataset
from tiny import is_smoke, taught

from covey import GRPOConfig, GRPOTrainer

ADJECTIVES = ["old", "cold", "pale", "young", "small", "blue", "lost", "slow"]
NOUNS = ["moon", "bird", "wind", "child", "boat", "rose", "king", "dog"]
VERBS = ["sings", "waits", "falls", "sleeps", "turns", "calls"]
RHYMES = [
    ["at night", "in the light", "so bright"],
    ["by the sea", "for me", "and is free"],
    ["all day", "far away", "in May"],
]


def line(rng, endings):
    return f"The {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} {rng.choice(VERBS)} {rng.choice(endings)}"


def row(rng):
    """A task, and for the tiny model a couplet that rhymes one time in two."""
    first = rng.choice(RHYMES)
    second = rng.choice([first, rng.choice(RHYMES)])
    return {
        "prompt": [{"role": "user", "content": "Write a couplet."}],
        "completion": f"{line(rng, first)}\n{line(rng, second)}",
    }


def rhyme(completions, **columns):
    """1 for two lines that end in different words of one rhyme."""

    def is_rhyme(text):
        lines = text.split("\n")
        endings = [
            (n, one) for line in lines for n, rhymes in enumerate(RHYMES) for one in rhymes if line.endswith(one)
        ]
        return len(lines) == len(endings) == 2 and endings[0][0] == endings[1][0] and endings[0][1] != endings[1][1]

    return [float(is_rhyme(one[0]["content"])) for one in completions]


smoke, rng = is_smoke(__doc__), random.Random(1)
model = taught("runs/creative-start", row)
for name, weight in (("form", 0.0), ("both", 1.0)):
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[rhyme, "distinct(n=2)"],  # the share of word pairs that no other completion of the prompt has
        args=GRPOConfig(
            output_dir=f"runs/creative-{name}",
            reward_weights=[1.0, weight],
            max_steps=20 if smoke else 150,
            num_generations=8,
            per_device_train_batch_size=64,
            max_completion_length=24,
            learning_rate=2e-3,
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=Dataset.from_list([row(rng) for _ in range(100)]),
    )
    trainer.train()
