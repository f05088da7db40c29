"""`covey doctor plan` against published figures: seconds of steps and of their parts, with the ratio of plan to figure.

    python benchmarks/plan.py

Needs no GPU. The plan is of Covey's own learner and of the roofline, the figures are of other trainers: a ratio of 0.5 says that
their run took twice as long as the roofline with its published shares (docs/plan.md).
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from typing import Any

from covey.doctor.roofline.answers import asynchrony
from covey.doctor.roofline.estimate import Estimate, Setup, estimate
from covey.doctor.roofline.gpus import gpus
from covey.doctor.roofline.known_models import known_config
from covey.doctor.roofline.options import planned

NEMO_3 = "github.com/NVIDIA-NeMo/RL/issues/959 (figures of v0.3 as published, and parts)"
NEMO_4 = "NVIDIA-NeMo/RL docs/about/performance-summary.md, v0.4"
VERL = "github.com/verl-project/verl/issues/1208"
PROMPT = 150
"""Tokens of a prompt of OpenMathInstruct-2 with its instruction; assumed, the pages do not say."""


@dataclass(frozen=True)
class Case:
    """Published figures of one run: seconds by part."""

    name: str
    source: str
    model: str
    where: str
    options: dict[str, Any]
    mean: float
    figures: dict[str, float]
    """By part: step, rollout, scoring, update, sync, or `step, asynchronous`."""
    prompt: int = PROMPT
    is_split: bool = True
    tensor_parallel: int = 1


def nemo(per_gpu: int, **more: Any) -> dict[str, Any]:
    """2,048 completions of 64 prompts, four updates of 512 from them, old and reference log-probabilities."""
    rows = min(4, per_gpu)
    accumulation = per_gpu // rows
    return {"num_generations": 32, "per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation,
            "steps_per_generation": 4 * accumulation, "max_completion_length": 4096 - PROMPT, "beta": 0.01, **more}  # fmt: skip


LLAMA, QWEN = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B"
CASES = [
    Case("NeMo-RL, Llama 8B, Megatron", NEMO_3, LLAMA, "8xH100", nemo(64), 795,
         {"step": 112, "rollout": 58, "scoring": 18, "update": 28, "sync": 5}),
    Case("NeMo-RL, Llama 8B, DTensor (FSDP2)", NEMO_3, LLAMA, "8xH100", nemo(64), 777,
         {"step": 122, "rollout": 57, "scoring": 19, "update": 38, "sync": 4}),
    Case("NeMo-RL, Llama 8B", NEMO_4, LLAMA, "16xH100", nemo(32), 1060 - PROMPT, {"step": 97.7}),
    Case("NeMo-RL, Llama 8B, one step off", NEMO_4, LLAMA, "16xH100", nemo(32), 1129 - PROMPT, {"step, asynchronous": 74.6}),
    Case("NeMo-RL, Qwen3 32B", NEMO_4, QWEN, "32xH100", nemo(16), 3206 - PROMPT, {"step": 393}, tensor_parallel=4),
    Case("NeMo-RL, Qwen3 32B, one step off", NEMO_4, QWEN, "64xH100", nemo(8), 3207 - PROMPT,
         {"step, asynchronous": 215}, tensor_parallel=4),
    Case("verl, Qwen2.5 0.5B, FSDP", VERL, "Qwen/Qwen2.5-0.5B", "4xGH200",
         {"num_generations": 5, "per_device_train_batch_size": 40, "gradient_accumulation_steps": 8, "steps_per_generation": 32,
          "max_completion_length": 1024, "beta": 0.001}, 325, {"scoring": 3.57 + 3.42, "update": 14.3}, prompt=102),
]  # fmt: skip


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| run | GPUs | part | planned | published | ratio |\n|---|---|---|--:|--:|--:|")
    ratios = []
    for case in CASES:
        for part, published in case.figures.items():
            value = part_of(case, plan_of(case), part)
            ratios.append(value / published)
            print(
                f"| {case.name} | {case.where} | {part} | {value:.3g} s | {published:g} s | {ratios[-1]:.2f} |",
                flush=True,
            )
    print(
        f"\n{len(ratios)} figures; ratio in the median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}"
    )
    for source in dict.fromkeys(case.source for case in CASES):
        print(f"* {source}")


_PLANS: dict[str, Estimate] = {}


def plan_of(case: Case) -> Estimate:
    if case.name not in _PLANS:
        options = {"output_dir": "unused", "report_to": "none", **case.options}
        config, _ = planned(options)
        if case.tensor_parallel > 1:  # theirs is vLLM beside a model that is split, which Covey refuses
            config.use_vllm, config.vllm_tensor_parallel_size = True, case.tensor_parallel
        count, gpu = gpus(case.where)
        _PLANS[case.name] = estimate(Setup(args=config, model_config=known_config(case.model), gpu=gpu, gpus=count,
                                           is_split=case.is_split, prompt_tokens=case.prompt, mean_tokens=case.mean))  # fmt: skip
    return _PLANS[case.name]


def part_of(case: Case, plan: Estimate, part: str) -> float:
    """Of one rollout and all updates from it, as the figures are."""
    args = plan.setup.args
    updates = args.steps_per_generation / args.gradient_accumulation_steps
    if part == "step, asynchronous":
        return updates * plan.seconds.step / float(asynchrony(plan).speed or 1)
    return float(updates * getattr(plan.seconds, part))


if __name__ == "__main__":
    main()
