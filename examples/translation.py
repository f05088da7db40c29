"""Translation: German into English, scored by BLEU against a reference.

    python examples/translation.py --smoke      # seconds on one core; without --smoke 150 steps

A real model: `model = "Qwen/Qwen2.5-0.5B-Instruct"`, and rows of yours with `prompt` and `reference`.
Expect: the tiny model was taught to leave words out or in German. BLEU rises.
"""

import random

from datasets import Dataset
from tiny import is_smoke, taught

from covey import GRPOConfig, GRPOTrainer

LEXICON = [
    {"Der": "The", "Ein": "A", "Kein": "No", "Mein": "My"},
    {"rote": "red", "alte": "old", "kleine": "small", "kluge": "clever"},
    {"Hund": "dog", "Mann": "man", "Vogel": "bird", "Freund": "friend"},
    {"schläft": "sleeps", "singt": "sings", "wartet": "waits", "lacht": "laughs"},
    {"heute": "today", "dort": "there", "oft": "often", "nie": "never"},
]


def row(rng):
    """A sentence of five words. The tiny model learns from `completion`; the reward reads `reference`."""
    pairs = [rng.choice(list(words.items())) for words in LEXICON]
    german, english = " ".join(word for word, _ in pairs), " ".join(word for _, word in pairs)
    poor = [rng.choices(["", old, new], [1, 2, 6])[0] for old, new in pairs]
    return {
        "prompt": [{"role": "user", "content": f"Translate: {german}."}],
        "reference": f"{english}.",
        "completion": " ".join(word for word in poor if word) + ".",
    }


smoke, rng = is_smoke(__doc__), random.Random(1)
trainer = GRPOTrainer(
    model=taught("runs/translation-start", row),
    reward_funcs="bleu(max_ratio=1.5)",  # above 1.5 times the reference's length it pays less
    args=GRPOConfig(
        output_dir="runs/translation",
        max_steps=15 if smoke else 150,
        num_generations=8,
        per_device_train_batch_size=64,
        max_completion_length=16,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=Dataset.from_list([row(rng) for _ in range(1000)]),
)
trainer.train()
