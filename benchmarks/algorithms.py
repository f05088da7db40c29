"""Every preset on the demo's task, the same budget: what it learns, how far it moves, what it costs.

    python benchmarks/algorithms.py --seeds 3 --steps 40
    python benchmarks/algorithms.py --reference          # TR-DPO: a reference that follows beside one that stands still

Set OMP_WAIT_POLICY=PASSIVE where anything else runs on the machine. Held-out accuracy is greedy, before and after; KL is the full-vocabulary distance of the trained policy from the shipped model on
the trained policy's own greedy answers, measured without having been a penalty. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer, demo
from covey import algorithms as alg
from covey.assessment import Assessment, assess
from covey.data import PromptStream
from covey.intervals import mean
from covey.learner import FrozenCopy, Policy
from covey.learner.packing import rows_of
from covey.models import load_model
from covey.rewards import Scorer
from covey.rollout import SamplingParams, choose_sampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="*", default=sorted(alg.PRESETS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=8, help="prompts a step, 8 completions each")
    parser.add_argument("--held-out", type=int, default=150)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument(
        "--reference", action="store_true", help="KL curves with a frozen and a following reference instead"
    )
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    if given.reference:
        compare_references(given)
    else:
        compare_presets(given)


def compare_presets(given: argparse.Namespace) -> None:
    found: dict[str, list[dict[str, float]]] = {}
    print(
        f"{given.steps} steps of {given.prompts} x 8, learning rate {given.learning_rate:g}, {given.seeds} seed(s), "
        f"{given.held_out} held-out problems\n"
    )
    print("| preset | before | after (each seed) | mean | KL to start | entropy | tokens | seconds |")
    print("|---|--:|---|--:|--:|--:|--:|--:|")
    for name in given.presets:
        found[name] = [train(name, seed, given) for seed in range(given.seeds)]
        print(line(name, found[name]), flush=True)
    print(json.dumps(found))


def line(name: str, runs: list[dict[str, float]]) -> str:
    after = [run["after"] for run in runs]
    estimate = mean(after)
    spread = f" ± {100 * (estimate.high - estimate.value):.0f}" if len(after) > 1 else ""
    middle = lambda key: statistics.median(run[key] for run in runs)
    each = ", ".join(f"{100 * value:.0f}" for value in after)
    return (
        f"| `{name}` | {100 * runs[0]['before']:.0f}% | {each} | {100 * estimate.value:.0f}%{spread} | {middle('kl'):.3f} | "
        f"{middle('entropy'):.3f} | {middle('tokens'):.1f} | {middle('seconds'):.0f} |"
    )


def trainer_for(algorithm: Any, seed: int, given: argparse.Namespace, folder: str, **changed: Any) -> GRPOTrainer:
    options = {
        **demo.DEMO_SETTINGS,
        "lr_scheduler_type": "constant_with_warmup",
        "learning_rate": given.learning_rate,
        "per_device_train_batch_size": 8 * given.prompts,
        "max_steps": given.steps,
        "save_strategy": "no",
        "rollout_log_steps": 0,
        **changed,
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
        trainer = trainer_for(name, seed, given, folder)
        before = held_out(trainer, given.held_out)
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
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
    rows = demo.rows("test", count)
    prompts = PromptStream(Dataset.from_list(rows), trainer.processing_class, seed=0, shuffle=False).take(count)
    sampler = choose_sampler(trainer.model, trainer.processing_class, eos_ids=trainer.eos_ids)
    return assess(sampler, Scorer([demo.reward]), prompts, max_tokens=trainer.args.max_completion_length)


@torch.no_grad()
def distance_from_start(trainer: GRPOTrainer, count: int = 64) -> float:
    """Mean over tokens of the full-vocabulary KL of the trained policy from the shipped model, on drawn answers."""
    rows = demo.rows("test", count)
    prompts = PromptStream(Dataset.from_list(rows), trainer.processing_class, seed=0, shuffle=False).take(count)
    sampler = choose_sampler(trainer.model, trainer.processing_class, eos_ids=trainer.eos_ids)
    params = SamplingParams(max_tokens=trainer.args.max_completion_length, seed=1)
    groups = [replace(g, advantages=torch.zeros(g.size)) for g in sampler.sample(prompts, 1, params)]
    rows_ = rows_of(groups)
    start = Policy(load_model(str(demo.model_path())).eval(), pad_id=trainer.processing_class.pad_token_id)
    policy = Policy(trainer.model.eval(), pad_id=trainer.processing_class.pad_token_id)
    measured = policy.measure(rows_, against=FrozenCopy(start).against(alg.full))
    assert measured.distance is not None
    tokens = sum(row.completion.num_tokens for row in rows_)
    return float(measured.distance.sum() / tokens)


def compare_references(given: argparse.Namespace) -> None:
    """The KL to the reference, step by step: it keeps rising against a frozen one and stays bounded against one that follows."""
    rules = {"frozen": alg.keep, "soft, every 10, alpha 0.6": alg.Every(10, 0.6), "hard, every 20": alg.Every(20, 1.0)}
    curves: dict[str, list[float]] = {}
    for name, rule in rules.items():
        algorithm = alg.dapo(kl=alg.KL(coefficient=0.01), reference=rule)
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_for(algorithm, 0, given, folder)
            trainer.train()
            accuracy = held_out(trainer, given.held_out).accuracy.value
        curves[name] = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
        shown = curves[name][:: max(1, len(curves[name]) // 10)]
        print(
            f"{name:<28} accuracy {100 * accuracy:.0f}%  KL " + " ".join(f"{value:.3f}" for value in shown), flush=True
        )
    print(json.dumps(curves))


if __name__ == "__main__":
    main()
