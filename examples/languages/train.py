"""Several languages in one run: word problems in English, German and Chinese, four ways, and what each language gains.

    python examples/languages/train.py --smoke      # seconds on one core; without --smoke some ten minutes

A real model: `model = "Qwen/Qwen2.5-0.5B-Instruct"`, and rows of yours with a column `language`.
Expect: a table of accuracy by language with 95% intervals, before and after each run. `transfer` sees no German question: its column
`de` says whether German gains or loses by what is learnt in the others. The smoke makes one short run of a model that has hardly
read German: it shows the table, not a gain.
"""

import sys

from datasets import Dataset
from task import LANGUAGES, rows, together
from warm_up import warm_up

from covey import GRPOConfig, GRPOTrainer

smoke = "--smoke" in sys.argv
RUNS = {
    "mixed": (rows("train", 700), {}),  # each question in one language
    "slices": (rows("train", 700), {"advantage_slices": "language"}),  # a scale for each language
    "groups": (together("train", 2000), {"group_languages": list(LANGUAGES)}),  # a question in all three is one group
    "transfer": (rows("train", 1000, ("en", "zh")), {}),  # no German
}


def trainer_of(name, model):
    data, options = RUNS[name]
    args = GRPOConfig(
        output_dir=f"runs/languages-{name}",
        max_steps=6 if smoke else 100,
        num_generations=12,
        num_generations_eval=1,
        per_device_train_batch_size=96,
        per_device_eval_batch_size=100,
        max_completion_length=32,
        learning_rate=6e-4,
        metrics_by=["language"],
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        **options,
    )
    return GRPOTrainer(
        model, "math", args, Dataset.from_list(data), Dataset.from_list(rows("test", 30 if smoke else 200))
    )


def line(name, found):
    """Accuracy by language with its 95% interval, drawn once a question."""
    parts = [[found[f"eval_reward/language={one}{end}"] for end in ("", "/low", "/high")] for one in LANGUAGES]
    print(
        f"| {name} | " + " | ".join(f"{value:.0%} ({low:.0%} to {high:.0%})" for value, low, high in parts) + " |",
        flush=True,
    )


model = warm_up("runs/languages-start", steps=40 if smoke else 400)
print("| run | en | de | zh |\n|---|--:|--:|--:|")
for name in ("transfer",) if smoke else RUNS:
    trainer = trainer_of(name, model)
    if name in ("mixed", "transfer"):
        line("start", trainer.evaluate())
    trainer.train()
    line(name, trainer.evaluate())
