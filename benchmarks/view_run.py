"""A large run to look at, made up from a seed and written with Covey's own writers, so that its files are those of a real run.

python benchmarks/view_run.py FOLDER --steps 100000 --completions 1000000
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import Tokenizer

import covey.demo
from covey.runs import RunFolder, rollouts
from covey.types import Alert, Completion, Group, Prompt

MODEL = Path(covey.demo.__file__).parent / "model"
NEEDLE = "a purple heron"
"""What a handful of completions say."""
NAMES = ("Ann", "Bo", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "June")
THINGS = ("apples", "pears", "stamps", "marbles", "coins", "shells", "pencils", "books")
REWARDS = ("correct", "format", "brief")
PLAIN = """approx_kl entropy frac_reward_zero_std grad_norm kl learning_rate loss policy_loss reward reward_std num_tokens
num_completions num_prompts epoch diversity/distinct_1 diversity/distinct_2 diversity/unique groups/all_fail groups/all_pass groups/drawn
prompts/drift prompts/mean_length rewards/unscored update/all update/changed update/embeddings update/rest memory/rollout_gb memory/learn_gb"""
LENGTHS = """clipped_ratio count max_length max_terminated_length mean_length mean_length_right mean_length_wrong
mean_terminated_length min_length min_terminated_length repetition"""
EVERY = 10
"""Steps between rollouts that are kept, the default of `rollout_log_steps`."""
GROUP = 10
AGAIN = 512
"""Prompts that come again all the time; each of the others comes in one stretch of the run."""


@dataclass(frozen=True)
class Size:
    """How large the run is."""

    steps: int
    completions: int

    @property
    def per_step(self) -> int:
        """Completions of a step that is kept, a whole number of groups."""
        return max(GROUP, self.completions // (self.steps // EVERY) // GROUP * GROUP)

    @property
    def kept(self) -> range:
        return range(EVERY, self.steps + 1, EVERY)


def make(folder: Path, size: Size, seed: int = 0, processes: int = 2) -> None:
    """Write `run.json`, `metrics.jsonl`, `alerts.jsonl`, `rollouts/` and a checkpoint's tokenizer."""
    run = RunFolder.create(folder)
    run.describe(args={"model": "demo", "seed": seed, "max_steps": size.steps, "learning_rate": 1e-6, "beta": 0.02})
    checkpoint = folder / f"checkpoint-{size.steps}"
    checkpoint.mkdir()
    shutil.copy2(MODEL / "tokenizer.json", checkpoint)
    kept = list(size.kept)
    with ProcessPoolExecutor(processes) as pool:
        parts = [pool.submit(write_rollouts, folder, kept[n::64], size.per_step, seed) for n in range(64)]
        write_metrics(run, size.steps, seed)
        for part in parts:
            part.result()
    run.close()


def write_metrics(run: RunFolder, steps: int, seed: int) -> None:
    """A line of about sixty metrics a step, with the noise of a real run, and an alert now and then."""
    rng = np.random.default_rng(seed)
    names = metric_names()
    for start in range(0, steps, 10_000):
        count = min(10_000, steps - start)
        noise = rng.normal(size=(count, len(names)))
        done = np.arange(start, start + count) / steps
        values = 0.5 + 0.4 * done[:, None] + 0.08 * noise
        for row in range(count):
            step = start + row + 1
            logs = dict(zip(names, values[row].tolist(), strict=True))
            logs["num_tokens"] = 2048.0 + step % 512
            if step % 20_011 == 0:
                logs["grad_norm"] = float("nan")
            run.append_metrics(
                step, logs, {"rollout": 0.5 + 0.1 * done[row], "reward": 0.02, "learn": 0.3, "step": 0.9}
            )
            if step % 2_000 == 1_000:
                run.append_alert(_alert(step))


def metric_names() -> list[str]:
    """The names of a real step."""
    under = {
        "": PLAIN,
        "clip_ratio/": "high_max high_mean low_mean low_min region_mean",
        "completions/": LENGTHS,
        "sampling/importance_sampling_ratio/": "max mean min",
        **{f"rewards/{name}/": "mean std advantage_share seconds" for name in REWARDS},
    }
    return [folder + name for folder, names in under.items() for name in names.split()]


def _alert(step: int) -> Alert:
    return Alert(
        rule="plateau", severity="warning" if step % 4_000 else "error", step=step,
        said="the reward has not risen for 1000 steps", evidence={"slope": 1e-6}, try_this=("raise learning_rate",),
    )  # fmt: skip


def write_rollouts(folder: Path, steps: Sequence[int], per_step: int, seed: int) -> None:
    """The files of these steps, each from a generator of its own."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for step in steps:
        groups = groups_of(random.Random(seed * 1_000_003 + step), tokenizer, step, per_step // GROUP)
        entropy: list[list[torch.Tensor | None]] = [
            list(torch.rand(GROUP, max(c.num_tokens for c in group.completions))) for group in groups
        ]
        rollouts.write(folder / "rollouts", step, groups, REWARDS, per_token={"entropy": entropy})


def groups_of(rng: random.Random, tokenizer: Any, step: int, count: int) -> list[Group]:
    """Word problems, each with ten answers."""
    questions = [_question(rng) for _ in range(count)]
    texts = [_answer(rng, step) for _ in range(count * GROUP)]
    encoded = [torch.tensor(one.ids) for one in tokenizer.encode_batch([question for question, _ in questions] + texts)]
    groups = []
    for place, (question, row) in enumerate(questions):
        mine = range(place * GROUP, (place + 1) * GROUP)
        uid = str(row) if row < AGAIN else f"{step // 1000}:{row}"
        prompt = Prompt(uid=uid, token_ids=tuple(encoded[place].tolist()), text=question, columns={"answer": str(row)})
        answers = [_completion(texts[at], encoded[count + at], rng, step) for at in mine]
        rewards = torch.tensor([[float(rng.random() < 0.6), rng.random(), -len(texts[at]) / 1000] for at in mine])
        total = rewards.sum(1)
        advantages = (total - total.mean()) / (total.std() + 1e-4)
        groups.append(Group(prompt=prompt, completions=tuple(answers), rewards=rewards, advantages=advantages))
    return groups


def _question(rng: random.Random) -> tuple[str, int]:
    row = rng.randrange(4096)
    name, thing = NAMES[row % len(NAMES)], THINGS[row % len(THINGS)]
    return f"{name} has {row} {thing} and finds {row % 7} more. How many {thing} are there?", row


def _answer(rng: random.Random, step: int) -> str:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b = rng.randrange(1000), rng.randrange(100)
    seen = f" {NEEDLE} flew by." if rng.random() < 1e-5 else ""
    return f"{name} starts with {a} {thing}, then gets {b}.{seen} That makes {a + b}. The answer is {a + b}."


def _completion(text: str, ids: torch.Tensor, rng: random.Random, step: int) -> Completion:
    logprobs = -torch.rand(len(ids))
    finish: Literal["length", "stop"] = "length" if rng.random() < 0.05 else "stop"
    return Completion(
        token_ids=ids, text=text, finish=finish, logprobs=logprobs, ref_logp=logprobs - 0.01, version=step - 1
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--completions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    start = time.monotonic()
    make(given.folder, Size(given.steps, given.completions), given.seed)
    print(f"{given.folder} in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
