"""Every preset on the demo's task, the same budget: what it learns, how far it moves, what it costs.

    python benchmarks/algorithms.py --seeds 3 --steps 40
    python benchmarks/algorithms.py --reference          # TR-DPO: a reference that follows beside one that stands still
    python benchmarks/algorithms.py --feedback           # SDPO's teacher: the shipped model with a right answer in its prompt

Held-out accuracy is greedy, before and after. KL is the full-vocabulary distance of the trained policy from the shipped model, on
answers that the trained policy draws: measured, not penalized. `--num-iterations 4` takes four updates on each rollout, where
clipping acts. All numbers go to `--out` as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer, demo
from covey import algorithms as alg
from covey.data import PromptStream
from covey.evaluation.assessment import Assessment, assess
from covey.learner import FrozenCopy, Policy
from covey.learner.packing import rows_of
from covey.models import load_model
from covey.rewards import Scorer
from covey.rollout import SamplingParams, choose_sampler
from covey.types import Prompt, ReferenceRule

SDPO = "regularizer=distill(teacher='policy', feedback='best', divergence='jsd'"
NAMED = {
    **{name: name for name in alg.PRESETS},
    "sdpo by distributions": f"dapo, objective=zero, {SDPO})",
    "srpo": f"dapo, advantage=SampleRouted(threshold=0.5), {SDPO}, threshold=0.5, entropy_sensitivity=1.0)",
}
"""The presets, and two algorithms composed of their parts."""
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95% quantiles of Student's t for 1 to 9 degrees of freedom; a handful of seeds needs them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="*", default=sorted(NAMED), choices=sorted(NAMED))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--prompts", type=int, default=8, help="prompts a step, 8 completions each")
    parser.add_argument("--num-iterations", type=int, default=1, help="optimizer steps on each rollout")
    parser.add_argument("--held-out", type=int, default=150)
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="held after a warm-up of 5 steps")
    parser.add_argument("--reference", action="store_true", help="KL curves against still and following references")
    parser.add_argument("--feedback", action="store_true", help="accuracy with and without feedback in the prompt")
    parser.add_argument("--beta", type=float, default=0.04, help="weight of the KL in the loss, with --reference")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON file")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    name = "references" if given.reference else "feedback" if given.feedback else f"algorithms-{given.num_iterations}"
    compare = compare_references if given.reference else compare_feedback if given.feedback else compare_presets
    found: Any = compare(given)
    given.out.mkdir(parents=True, exist_ok=True)
    asked = {**vars(given), "out": str(given.out), "torch_threads": torch.get_num_threads()}
    (given.out / f"{name}.json").write_text(json.dumps({"asked": asked, "found": found}, indent=1))


def compare_presets(given: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Prints a row of the table as soon as a preset's seeds are done."""
    found: dict[str, list[dict[str, float]]] = {}
    print(
        f"{given.steps} steps of {given.prompts} x 8, {given.num_iterations} a rollout, learning rate "
        f"{given.learning_rate:g}, {given.seeds} seed(s), {given.held_out} held-out problems\n"
    )
    print("| preset | before | after, each seed | after, mean | KL to start | entropy | tokens | CPU seconds |")
    print("|---|--:|---|--:|--:|--:|--:|--:|", flush=True)
    for name in given.presets:
        found[name] = [train(name, seed, given) for seed in range(given.seeds)]
        print(line(name, found[name]), flush=True)
    return found


def line(name: str, runs: list[dict[str, float]]) -> str:
    after = [100 * run["after"] for run in runs]
    middle = lambda key: statistics.median(run[key] for run in runs)
    each = ", ".join(f"{value:.0f}" for value in after)
    return (
        f"| `{name}` | {100 * runs[0]['before']:.0f}% | {each} | {with_interval(after)} | {middle('kl'):.3f} | "
        f"{middle('entropy'):.3f} | {middle('tokens'):.1f} | {middle('seconds'):.0f} |"
    )


def with_interval(values: Sequence[float]) -> str:
    """`81% ± 4`: the mean with half the width of its 95% t-interval, where there are 2 to 10 values."""
    center = f"{statistics.mean(values):.0f}%"
    if not 2 <= len(values) <= len(T95) + 1:
        return center
    return f"{center} ± {T95[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values)):.0f}"


def trainer_for(algorithm: Any, seed: int, given: argparse.Namespace, folder: str) -> GRPOTrainer:
    options = {
        **demo.DEMO_SETTINGS,
        "lr_scheduler_type": "constant_with_warmup",
        "learning_rate": given.learning_rate,
        "per_device_train_batch_size": 8 * given.prompts,
        "num_iterations": given.num_iterations,
        "max_steps": given.steps,
        "save_strategy": "no",
        "rollout_log_steps": 0,
    }
    args = GRPOConfig(output_dir=folder, seed=seed, report_to="none", disable_tqdm=True, **options)
    return GRPOTrainer(
        model=str(demo.model_path()),
        reward_funcs=demo.reward,
        args=args,
        train_dataset=Dataset.from_list(demo.rows("train")),
        algorithm=algorithm,
    )


def train(name: str, seed: int, given: argparse.Namespace) -> dict[str, float]:
    """One run of a preset from the shipped model."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(NAMED[name], seed, given, folder)
        before = held_out(trainer, given.held_out)
        started = time.process_time()
        trainer.train()
        seconds = time.process_time() - started
        after = held_out(trainer, given.held_out)
        entropies = [entry["entropy"] for entry in trainer.state.log_history if "entropy" in entry]
        return {
            "before": before.accuracy.value,
            "after": after.accuracy.value,
            "tokens": after.mean_length,
            "entropy": statistics.mean(entropies[-5:]),
            "kl": distance_from_start(trainer),
            "seconds": seconds,
        }


def held_out(trainer: GRPOTrainer, count: int) -> Assessment:
    sampler = choose_sampler(trainer.model, trainer.processing_class, eos_ids=trainer.eos_ids)
    prompts = test_prompts(trainer, count)
    return assess(sampler, Scorer([demo.reward]), prompts, max_tokens=trainer.args.max_completion_length)


def test_prompts(trainer: GRPOTrainer, count: int) -> Sequence[Prompt]:
    rows = Dataset.from_list(demo.rows("test", count))
    return PromptStream(rows, trainer.processing_class, seed=0, shuffle=False).take(count)


@torch.no_grad()
def distance_from_start(trainer: GRPOTrainer, count: int = 64) -> float:
    """Mean over tokens of the full-vocabulary KL of the trained policy from the shipped model, on drawn answers."""
    sampler = choose_sampler(trainer.model, trainer.processing_class, eos_ids=trainer.eos_ids)
    params = SamplingParams(max_tokens=trainer.args.max_completion_length, seed=1)
    groups = sampler.sample(test_prompts(trainer, count), 1, params)
    answers = rows_of([replace(group, advantages=torch.zeros(group.size)) for group in groups])
    pad_id = trainer.processing_class.pad_token_id
    start = FrozenCopy(Policy(load_model(str(demo.model_path())).eval(), pad_id=pad_id))
    measured = Policy(trainer.model.eval(), pad_id=pad_id).measure(answers, against=start.against(alg.full))
    assert measured.distance is not None
    return float(measured.distance.sum() / sum(row.completion.num_tokens for row in answers))


def compare_references(given: argparse.Namespace) -> dict[str, Any]:
    """GRPO with one KL term and three rules for its reference: the KL by step, accuracy, and the way gone from the start."""
    rules: dict[str, ReferenceRule] = {
        "frozen": alg.keep,
        "soft, every 10 by 0.6": alg.Every(10, 0.6),
        "hard, every 20": alg.Every(20, 1.0),
    }
    found = {name: curve(rule, given) for name, rule in rules.items()}
    print("| step | " + " | ".join(found) + " |")
    print("|--:|" + "--:|" * len(found))
    for step in range(5, given.steps + 1, 5):
        cells = [f"{statistics.mean(one['kl'][step - 5 : step]):.3f}" for one in found.values()]
        print(f"| {step - 4} to {step} | " + " | ".join(cells) + " |")
    for key, shown in (("kl_to_start", "KL to the start, at the end"), ("after", "held-out accuracy")):
        print(f"| {shown} | " + " | ".join(f"{one[key]:.3f}" for one in found.values()) + " |")
    return found


def compare_feedback(given: argparse.Namespace) -> dict[str, tuple[float, float, float]]:
    """Greedy accuracy on prompts as they are, and with the best of eight draws behind them, where some draws are right and some wrong."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for("dapo", 0, given, folder)
        tokenizer, scorer = trainer.processing_class, Scorer([demo.reward])
        sampler = choose_sampler(trainer.model, tokenizer, eos_ids=trainer.eos_ids)
        drawn = sampler.sample(test_prompts(trainer, given.held_out), 8, SamplingParams(max_tokens=32, seed=0))
        plain, hinted = [], []
        for group in scorer.score(list(drawn)):
            assert group.rewards is not None
            rewards = group.rewards[:, 0]
            if (rewards >= 0.5).any() and (rewards < 0.5).any():
                best = group.completions[int(rewards.argmax())].text
                assert group.prompt.messages is not None
                asked = [{"role": "user", "content": f"{group.prompt.messages[-1]['content']}\n\n{best}"}]
                ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
                plain.append(group.prompt)
                hinted.append(replace(group.prompt, token_ids=tuple(ids)))
        found = {}
        for name, prompts in (("as it is", plain), ("with the best answer", hinted)):
            accuracy = assess(sampler, scorer, prompts, max_tokens=32).accuracy
            found[name] = (accuracy.value, accuracy.low, accuracy.high)
            print(
                f"{name}: {accuracy.value:.1%} (95% {accuracy.low:.1%} to {accuracy.high:.1%}), {len(prompts)} prompts"
            )
    return found


def curve(rule: ReferenceRule, given: argparse.Namespace) -> dict[str, Any]:
    """One run: the mean KL (k3) to the reference at each step, seeds averaged."""
    runs = []
    for seed in range(given.seeds):
        algorithm = alg.grpo(kl=alg.KL(coefficient=given.beta), reference=rule)
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_for(algorithm, seed, given, folder)
            trainer.train()
            kl = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
            after = held_out(trainer, given.held_out).accuracy.value
            runs.append((kl, after, distance_from_start(trainer)))
    return {
        "kl": [statistics.mean(values) for values in zip(*(kl for kl, _, _ in runs), strict=True)],
        "after": statistics.mean(after for _, after, _ in runs),
        "kl_to_start": statistics.mean(distance for _, _, distance in runs),
    }


if __name__ == "__main__":
    main()
