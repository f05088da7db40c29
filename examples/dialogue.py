"""Dialogue over several turns: replies that are relevant, coherent, use what was said before, and keep a style.

    python examples/dialogue.py --smoke      # seconds on one core; without --smoke 150 steps

A real model: `model = "Qwen/Qwen2.5-0.5B-Instruct"`, and conversations of yours; `judge(...)` can score what a rule cannot.
Expect: the tiny model was taught to forget names, to change the subject and to mix styles. All four rewards rise.
"""

import random

from datasets import Dataset
from tiny import is_smoke, taught

from covey import GRPOConfig, GRPOTrainer

NAMES, HOBBIES = ["Anna", "Omar", "Mia", "Leo"], ["chess", "tennis", "music", "football"]
QUESTIONS = {"What shall I do tonight?": "play", "What can I read?": "read", "Where can I meet people?": "club"}
ANSWERS = {"play": "you can play {}", "read": "you can read of {}", "club": "try the {} club"}
STYLES = {"formal": "Certainly", "casual": "Sure"}


def row(rng):
    """A conversation of two or three turns. The tiny model learns from `completion`; the rewards read the other columns."""
    name, hobby, style = rng.choice(NAMES), rng.choice(HOBBIES), rng.choice(list(STYLES))
    question, topic = rng.choice(list(QUESTIONS.items()))
    small_talk = [("user", "It rains today."), ("assistant", "Yes, it does.")] * rng.randint(0, 1)
    turns = [("user", f"I am {name} and I like {hobby}."), ("assistant", "Hello!"), *small_talk, ("user", question)]
    said = ANSWERS[rng.choice([topic, rng.choice(list(ANSWERS))])].format(
        rng.choice([hobby, hobby, rng.choice(HOBBIES)])
    )
    return {
        "prompt": [{"role": role, "content": text} for role, text in [("system", f"Be {style}."), *turns]],
        "name": name, "hobby": hobby, "topic": topic, "style": style,
        "completion": f"{STYLES[rng.choice([style, rng.choice(list(STYLES))])]}, {rng.choice([name, 'friend'])}, {said}.",
    }  # fmt: skip


def relevance(completions, topic, **columns):
    """The reply answers the last question."""
    return [float(word in one[0]["content"]) for one, word in zip(completions, topic, strict=True)]


def context(completions, name, hobby, **columns):
    """The reply uses what the first turn told: the name, and what the user likes."""
    told = zip(completions, name, hobby, strict=True)
    return [sum(word in one[0]["content"] for word in words) / 2 for one, *words in told]


def coherence(completions, name, hobby, **columns):
    """Nothing in the reply contradicts an earlier turn: no other name, no other hobby."""
    others = [{*NAMES, *HOBBIES} - {*mine} for mine in zip(name, hobby, strict=True)]
    return [
        float(not any(word in one[0]["content"] for word in wrong))
        for one, wrong in zip(completions, others, strict=True)
    ]


def style(completions, style, **columns):
    """The reply opens as the system message asks."""
    return [float(one[0]["content"].startswith(STYLES[wanted])) for one, wanted in zip(completions, style, strict=True)]


smoke, rng = is_smoke(__doc__), random.Random(1)
trainer = GRPOTrainer(
    model=taught("runs/dialogue-start", row),
    reward_funcs=[relevance, context, coherence, style],
    args=GRPOConfig(
        output_dir="runs/dialogue",
        multi_objective_aggregation="normalize_then_sum",  # GDPO: no reward drowns in the others
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
