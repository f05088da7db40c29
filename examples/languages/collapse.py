"""Answers leave the language of their prompts while the reward rises; the alert says so, and a reward for the language mends it.

    python examples/languages/collapse.py --smoke      # without the remedy alone; the whole takes two minutes on one core

German questions. The tiny model was taught to answer a quarter of them in English, and misreads 50% of those that it answers in
German, 10% of the others, much as a large model reasons better in English. Right answers are all that `plain` pays for, so it
drifts into English. `paid` adds the reward `language`, which reads the column `language` (`pip install 'covey[rewards]'`).
A real model: `model = "Qwen/Qwen2.5-0.5B-Instruct"`, and questions of yours with that column.
Expect: `plain` gets more answers right and fewer in German, and the alert `language_collapse` speaks; `paid` keeps its German.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean

from datasets import Dataset
from task import MISREAD, SIGNS, draw, rows

from covey import GRPOConfig, GRPOTrainer

sys.path.append(str(Path(__file__).parents[1]))
import tiny

WORDS = {"en": "That is the answer, and it is {}", "de": "Das ist die Antwort, und sie ist {}"}
MISREADS = {"en": 0.1, "de": 0.5}
RUNS = {"plain": (["math"], None), "paid": (["math", "language"], [1.0, 0.5])}
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--smoke", action="store_true")
parser.add_argument("--seed", type=int, default=0)
given = parser.parse_args()


def taught(rng):
    """A German question and the teacher's answer, in English in one of four."""
    one = draw(rng)
    while one.is_held_out:
        one = draw(rng)
    language, sign = "en" if rng.random() < 0.25 else "de", SIGNS[one.kind]
    said = one.worked(MISREAD[sign] if rng.random() < MISREADS[language] else sign)
    return {"prompt": one.asked("de"), "completion": WORDS[language].format(said)}


model = tiny.taught("runs/collapse-start", taught, steps=400)
questions = Dataset.from_list(rows("train", 2000, ("de",)))
for name in ["plain"] if given.smoke else RUNS:
    rewards, weights = RUNS[name]
    args = GRPOConfig(
        output_dir=f"runs/collapse-{name}-{given.seed}",
        seed=given.seed,
        max_steps=40,
        num_generations=6,
        per_device_train_batch_size=192,
        max_completion_length=24,
        learning_rate=5e-4,
        reward_weights=weights,
        metrics_by=["language"],
        save_strategy="no",
        logging_steps=1,
        report_to="none",
    )
    trainer = GRPOTrainer(model, rewards, args, questions)
    trainer.train()
    lines = [json.loads(line) for line in Path(args.output_dir, "metrics.jsonl").read_text().splitlines()]
    for said, metric in (("right", "rewards/math/mean"), ("in German", "languages/de/same")):
        values = [line[metric] for line in lines if metric in line]
        print(f"{name}: {said} {fmean(values[:5]):.0%} at first, {fmean(values[-5:]):.0%} at last")
