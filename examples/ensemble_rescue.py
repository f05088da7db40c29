"""A policy that never finds the answer by itself, and learns it from a member of its ensemble that does.

Both start from the model that ships with Covey. The policy is first taught to misread every two-step problem, so all of its
answers are wrong and GRPO alone has nothing to learn from. The member is taught to read them. It has the role `rescue`:
its right answers join the groups in which the policy failed throughout.

    python examples/ensemble_rescue.py --smoke      # one seed, 20 steps with the member; without --smoke two minutes on one free core

A real model: `policy = "Qwen/Qwen2.5-0.5B-Instruct"` and `member = "Qwen/Qwen2.5-7B-Instruct"` in `main`, and rows of yours.
Expect: of the held-out problems the policy solves none before, and still none alone; with the member more than half. 3 seeds.
"""

from __future__ import annotations

import covey  # noqa: F401  # isort: skip  # before torch: docs/performance.md, threads

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from covey import Ensemble, GRPOConfig, GRPOTrainer, Member
from covey.demo import model_path, reward
from covey.demo.make_model import MISREAD, encoded
from covey.demo.task import TEMPLATES, Problem, draw, worked
from covey.models import load_model, load_tokenizer

TWO_STEPS = range(8, 12)
"""Templates of problems with two operations."""


def problems(split: str, count: int, seed: int) -> list[Problem]:
    rng = random.Random(f"{split}/{seed}")
    found: list[Problem] = []
    while len(found) < count:
        one = draw(rng)
        if one.template in TWO_STEPS and one.split == split:
            found.append(one)
    return found


def rows(split: str, count: int, seed: int = 0) -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": one.question}], "answer": str(one.answer)}
            for one in problems(split, count, seed)
        ]
    )


def taught(folder: Path, *, is_right: bool, steps: int) -> Path:
    """The shipped model after next-token training on answers to two-step problems, read right or always misread."""
    torch.manual_seed(0)
    model = load_model("demo")
    tokenizer = load_tokenizer(model, model_path())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / steps)
        pairs = []
        for one in problems("train", 32, seed=step + 1):
            operations = None if is_right else MISREAD[TEMPLATES[one.template][0]]
            pairs.append(encoded(tokenizer, one, worked(one, operations)))
        width = max(len(prompt) + len(answer) for prompt, answer in pairs)
        ids = torch.full((len(pairs), width), tokenizer.pad_token_id)
        labels = torch.full((len(pairs), width), -100)
        for i, (prompt, answer) in enumerate(pairs):
            ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            labels[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(policy: Path, member: Path | None, out: Path, seed: int, steps: int) -> dict[str, Any]:
    """One run; the share of right answers on held-out problems before and after, and the reward at some steps."""
    config = GRPOConfig(
        str(out), seed=seed, max_steps=steps, num_generations=8, per_device_train_batch_size=48, learning_rate=1e-3,
        max_completion_length=32, save_strategy="no", report_to="none", logging_steps=1, use_cpu=True, bf16=False,
        gradient_checkpointing=False, per_device_eval_batch_size=200, num_generations_eval=1, rollout_dtype="float32",
        log_level="error", disable_tqdm=True, alert_actions={"all": "off"},
    )  # fmt: skip
    ensemble = None if member is None else Ensemble([Member(str(member), role="rescue", samples=4, name="reader")])
    trainer = GRPOTrainer(
        str(policy), reward, config, rows("train", 2000, seed=1000 + seed), rows("test", 150), ensemble=ensemble
    )
    before = trainer.evaluate()["eval_reward"]
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    asked = [entry.get("ensemble/reader/asked", 0.0) for entry in history]
    return {
        "before": before,
        "after": trainer.evaluate()["eval_reward"],
        "rewards": [entry["reward"] for entry in history],
        "asked": asked,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lessons", type=int, default=60, help="steps that policy and member are taught for")
    parser.add_argument("--smoke", action="store_true", help="one seed, 20 steps, with the member only")
    given = parser.parse_args()
    arms = ("alone", "rescue")
    if given.smoke:
        given.seeds, given.steps, arms = 1, 20, ("rescue",)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        policy = taught(place / "policy", is_right=False, steps=given.lessons)
        member = taught(place / "member", is_right=True, steps=given.lessons)
        print(
            f"{'run':<8}{'seed':>5}{'before':>9}{'after':>9}   reward at steps 1, 1/4, 1/2, 3/4, end   asked: first, last fifth"
        )
        for seed in range(given.seeds):
            for name in arms:
                found = run(policy, member if name == "rescue" else None, place / f"{name}-{seed}", seed, given.steps)
                last = given.steps - 1
                at = " ".join(f"{found['rewards'][i * last // 4]:.2f}" for i in range(5))
                fifth = max(1, given.steps // 5)
                asked = [sum(part) / len(part) for part in (found["asked"][:fifth], found["asked"][-fifth:])]
                print(
                    f"{name:<8}{seed:>5}{found['before']:>9.3f}{found['after']:>9.3f}   {at:<38}  {asked[0]:.2f}  {asked[1]:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
