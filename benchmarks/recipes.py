"""Writes the recipes of `src/covey/recipes`: options by model, hardware and data, each with what `covey doctor plan` says of it.

`python benchmarks/recipes.py` writes all of them, `python benchmarks/recipes.py NAME ...` some. No GPU and no weights are needed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from covey.cli.recipe import FOLDER

GIB = 2**30
DATA: dict[str, dict[str, Any]] = {
    "gsm8k": {
        "dataset": "openai/gsm8k",
        "dataset_config": "main",
        "prompt_column": "question",
        "eval_dataset": "openai/gsm8k:test",
        "max_completion_length": 512,
        "max_steps": 300,
    },
    "math": {
        "dataset": "DigitalLearningGmbH/MATH-lighteval",
        "prompt_column": "problem",
        "answer_column": "solution",
        "eval_dataset": "DigitalLearningGmbH/MATH-lighteval:test",
        "max_completion_length": 2048,
        "max_steps": 300,
    },
}
LENGTHS = {"gsm8k": (150, 250), "math": (200, 600)}
"""Tokens of a prompt and of a completion in the mean, as the plan takes them: Qwen2.5-Instruct's, roughly."""
CARDS = {
    "24gb": ("RTX4090", "one card with 24 GB, such as an RTX 4090"),
    "48gb": ("L40S", "one card with 48 GB, such as an L40S"),
    "h100": ("H100", "one H100 with 80 GB"),
    "2xh100": ("2xH100", "two H100 with 80 GB, one of which writes"),
    "8xh100": ("8xH100", "eight H100 with 80 GB"),
    "2x8xh100": ("16xH100", "two nodes of eight H100 with 80 GB"),
}
COMMON: dict[str, Any] = {
    "reward": ["math"],
    "system_prompt": "Reason step by step, and put the final answer in \\boxed{}.",
    "num_generations": 8,
    "beta": 0.0,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 10,
    "eval_strategy": "steps",
    "eval_steps": 25,
    "max_eval_prompts": 200,
    "save_steps": 25,
    "save_total_limit": 2,
}
LORA: dict[str, Any] = {"lora_r": 16, "dtype": "bfloat16", "learning_rate": 4e-5}
FULL: dict[str, Any] = {"learning_rate": 1e-6}
VLLM = {"use_vllm": True, "vllm_mode": "colocate"}
ASYNC = {"async_rollouts": True, "max_staleness": 1}
SPLIT = {"fsdp": "true"}
WAYS: dict[str, dict[str, Any]] = {"lora": LORA, "full": FULL}


@dataclass(frozen=True)
class Recipe:
    """`qwen2.5-7b-lora-h100`: size, way and card are in the name, and `rows`, the completions of a micro-batch."""

    size: str
    way: str
    card: str
    rows: int
    data: str = "gsm8k"
    more: str = ""
    """`vllm` or `async`."""
    prompts: int = 32
    """Prompts of a step."""

    @property
    def name(self) -> str:
        parts = [f"qwen2.5-{self.size}", self.way, self.more, self.card, self.data if self.data != "gsm8k" else ""]
        return "-".join(part for part in parts if part)

    @property
    def processes(self) -> int:
        return {"8xh100": 8, "2x8xh100": 16}.get(self.card, 1)

    def options(self) -> dict[str, Any]:
        """Options of `covey train`."""
        is_split = self.processes > 1 and float(self.size.rstrip("b")) > 3
        return {
            "model": f"Qwen/Qwen2.5-{self.size.upper()}-Instruct",
            **DATA[self.data],
            **COMMON,
            **WAYS[self.way],
            **(VLLM if self.more == "vllm" else ASYNC if self.more == "async" else {}),
            **(SPLIT if is_split else {}),
            "per_device_train_batch_size": self.rows,
            "gradient_accumulation_steps": self.prompts * COMMON["num_generations"] // self.processes // self.rows,
        }


RECIPES = (
    Recipe("0.5b", "full", "24gb", 8),
    Recipe("0.5b", "full", "48gb", 32),
    Recipe("0.5b", "full", "h100", 64),
    Recipe("0.5b", "full", "h100", 64, more="vllm"),
    Recipe("1.5b", "lora", "24gb", 8),
    Recipe("1.5b", "full", "48gb", 16),
    Recipe("1.5b", "full", "h100", 32),
    Recipe("1.5b", "full", "h100", 32, more="vllm"),
    Recipe("1.5b", "full", "h100", 16, data="math"),
    Recipe("1.5b", "full", "8xh100", 32, prompts=128),
    Recipe("3b", "lora", "24gb", 8),
    Recipe("3b", "lora", "48gb", 16),
    Recipe("3b", "full", "h100", 16),
    Recipe("3b", "full", "8xh100", 16, prompts=128),
    Recipe("7b", "lora", "24gb", 2),
    Recipe("7b", "lora", "48gb", 8),
    Recipe("7b", "lora", "h100", 16),
    Recipe("7b", "lora", "h100", 16, more="vllm"),
    Recipe("7b", "lora", "h100", 8, data="math"),
    Recipe("7b", "lora", "2xh100", 16, more="async"),
    Recipe("7b", "full", "8xh100", 16, prompts=128),
    Recipe("7b", "full", "8xh100", 8, data="math", prompts=128),
    Recipe("7b", "full", "2x8xh100", 16, prompts=128),
    Recipe("14b", "lora", "48gb", 2),
    Recipe("14b", "lora", "h100", 8),
    Recipe("32b", "lora", "8xh100", 4, prompts=128),
    Recipe("32b", "lora", "2x8xh100", 4, data="math", prompts=128),
)


def facts(recipe: Recipe) -> dict[str, str]:
    """Lines of the head: hardware, lengths, and what the plan says."""
    from covey.cli import doctor_plan, train
    from covey.cli.flags import typed
    from covey.doctor.roofline.estimate import estimate

    gpus, _ = CARDS[recipe.card]
    prompt, mean = LENGTHS[recipe.data]
    options = {"gpus": gpus, "prompt_tokens": prompt, "mean_completion_tokens": mean, **recipe.options()}
    types = {**{flag.name: flag.type for flag in doctor_plan.verb.flags()}, **train.flag_types()}
    plan = estimate(doctor_plan.setup_of(typed(options, types)))
    if not plan.fits:
        raise SystemExit(f"{recipe.name} does not fit: {plan.held.peak / GIB:.1f} GiB")
    return {
        "gpus": gpus,
        "prompt_tokens": str(prompt),
        "mean_completion_tokens": str(mean),
        "planned_seconds_a_step": f"{plan.seconds.step:.3g}",
        "planned_peak_gib": f"{plan.held.peak / GIB:.1f}",
        "measured": "no",
    }


def text_of(recipe: Recipe) -> str:
    """The file: what it is for, its facts as comments, and its options."""
    way = {"lora": "LoRA of rank 16", "full": "all weights"}[recipe.way]
    more = {"": "", "vllm": ", vLLM in the same process", "async": ", asynchronous rollouts"}[recipe.more]
    data = {"gsm8k": "GSM8K", "math": "MATH"}[recipe.data]
    title = f"# Qwen2.5-{recipe.size.upper()}-Instruct on {data}: {way}{more}; {CARDS[recipe.card][1]}\n"
    head = "".join(f"# {name}: {value}\n" for name, value in facts(recipe).items())
    return title + head + yaml.safe_dump(recipe.options(), sort_keys=False, width=110)


def main(names: list[str]) -> None:
    for recipe in RECIPES:
        if not names or recipe.name in names:
            text = text_of(recipe)
            Path(FOLDER, f"{recipe.name}.yaml").write_text(text)
            print(recipe.name, *text.splitlines()[4:6], flush=True)
    page()


def page() -> None:
    """Write both tables of docs/recipes.md: sizes by card, and every file."""
    from covey.cli.recipe import recipes

    rows = ["| recipe | GPUs | seconds a step | GiB at the peak | measured |", "|---|---|--:|--:|---|"]
    for name, recipe in recipes().items():
        facts = recipe.facts
        rows.append(
            f"| [{name}](../src/covey/recipes/{name}.yaml) | {facts['gpus']} | {facts['planned_seconds_a_step']} | "
            f"{facts['planned_peak_gib']} | {facts['measured']} |"
        )
    place = Path(__file__).parents[1] / "docs" / "recipes.md"
    text = filled(
        place.read_text(), "<!-- cards: written by benchmarks/recipes.py -->", cards(), "<!-- end of cards -->"
    )
    place.write_text(filled(text, "<!-- recipes: written by benchmarks/recipes.py -->", rows, "<!-- end -->"))


def cards() -> list[str]:
    """Rows of the table of sizes by card: the plain recipes on GSM8K."""
    rows = ["| your GPUs | in the name | all weights: `full` | LoRA: `lora` |", "|---|---|---|---|"]
    for card, (_, words) in CARDS.items():
        plain = [recipe for recipe in RECIPES if (recipe.card, recipe.data, recipe.more) == (card, "gsm8k", "")]
        links = {
            way: [f"[{r.size.upper()}](../src/covey/recipes/{r.name}.yaml)" for r in plain if r.way == way]
            for way in WAYS
        }
        if plain:
            rows.append(
                f"| {words} | `{card}` | {', '.join(links['full']) or 'none'} | {', '.join(links['lora']) or 'none'} |"
            )
    return rows


def filled(text: str, start: str, rows: list[str], end: str) -> str:
    """The text with the rows between two marks."""
    before, _, rest = text.partition(f"{start}\n")
    return before + f"{start}\n\n" + "\n".join(rows) + f"\n\n{end}" + rest.partition(end)[2]


if __name__ == "__main__":
    main(sys.argv[1:])
