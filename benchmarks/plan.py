"""`covey doctor plan` against published figures: seconds of steps and of their parts, and GiB, with the ratio of plan to figure.

    python benchmarks/plan.py

Needs no GPU. The plan is of Covey's own learner and of the roofline, the figures are of other trainers: a ratio of 0.5 says that
their run took twice as long as the roofline with its published shares (docs/plan.md).
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, replace
from typing import Any

from covey.doctor.roofline.answers import asynchrony
from covey.doctor.roofline.estimate import Estimate, Setup, estimate
from covey.doctor.roofline.gpus import gpus
from covey.doctor.roofline.options import config_by_name, planned

NEMO_3 = "github.com/NVIDIA-NeMo/RL/issues/959 (figures of v0.3 as published, and parts)"
NEMO_4 = "NVIDIA-NeMo/RL docs/about/performance-summary.md, v0.4"
VERL = "github.com/verl-project/verl/issues/1208"
TITAN = (
    "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: 82.4 GiB on 8 GPUs, 67.0 on 128"
)
QWEN_25 = "QwenLM/Qwen2.5 docs/source/benchmark/speed_benchmark.rst (vLLM 0.6.3)"
QWEN_3 = "QwenLM/Qwen3 docs/source/getting_started/speed_benchmark.md (SGLang 0.4.6)"
UNSLOTH = "unsloth.ai/blog/grpo: 54.3 GB, of TRL with FlashAttention 2 510.8 GB"
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

DECODING = [("Qwen/Qwen2.5-0.5B", "A100", 311.55, QWEN_25), ("Qwen/Qwen2.5-1.5B", "A100", 183.33, QWEN_25),
            ("Qwen/Qwen3-0.6B", "H20", 414.17, QWEN_3), ("Qwen/Qwen3-1.7B", "H20", 227.80, QWEN_3),
            ("Qwen/Qwen3-4B", "H20", 133.13, QWEN_3), ("Qwen/Qwen3-8B", "H20", 81.73, QWEN_3)]  # fmt: skip
"""Tokens a second of one completion of 2,048 tokens behind a prompt of one."""


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
    print("\n| memory | GPUs | planned | published | ratio |\n|---|---|--:|--:|--:|")
    for name, where, value, published in (
        ("a full fine-tune's state, less on 128 GPUs than on 8", "H100", state_gib(8) - state_gib(128), 82.4 - 67.0),
        ("Llama 8B, LoRA, 8 completions of 20K: peak", "1xH100", lora_gib(), 54.3e9 / 2**30),
    ):
        print(f"| {name} | {where} | {value:.1f} GiB | {published:.1f} GiB | {value / published:.2f} |", flush=True)
    print(
        "\n| one completion | GPU | planned, ms a token | reading alone | published | ratio |\n|---|---|--:|--:|--:|--:|"
    )
    for model, where, rate, _ in DECODING:
        value, reading = token_ms(model, where)
        print(
            f"| {model} | {where} | {value:.2f} | {reading:.2f} | {1000 / rate:.2f} | {value * rate / 1000:.2f} |",
            flush=True,
        )
    for source in [*dict.fromkeys(case.source for case in CASES), TITAN, UNSLOTH, QWEN_25, QWEN_3]:
        print(f"* {source}")


def token_ms(model: str, where: str) -> tuple[float, float]:
    """Milliseconds of a token of one completion of 2,048 tokens, and those without the launches of kernels."""
    setup = setup_of(
        model, where, 1, False, {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 2048}
    )
    whole = estimate(setup).decoding
    bare = replace(whole, kernels=0)
    return tuple(one.seconds(1, 1, 1, 2048, 2048) / 2.048 for one in (whole, bare))  # type: ignore[return-value]


def state_gib(count: int) -> float:
    """Weights, gradients and optimizer state of Llama 3.1 8B on each of so many GPUs, split by FSDP2."""
    held = memory_plan(f"{count}xH100", is_split=True, prompt=64, per_device_train_batch_size=2, num_generations=2,
                       max_completion_length=64).held  # fmt: skip
    return (held.weights + held.gradients + held.optimizer) / 2**30


def lora_gib() -> float:
    """Peak of a step with 8 completions in a micro-batch, on frozen weights in bfloat16."""
    from peft import LoraConfig

    adapter = LoraConfig(r=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return memory_plan("1xH100", adapter=adapter, prompt=500, model_init_kwargs={"dtype": "bfloat16"}, num_generations=8,
                       per_device_train_batch_size=8, max_completion_length=19_500).held.peak / 2**30  # fmt: skip


def memory_plan(where: str, *, prompt: int, adapter: Any = None, is_split: bool = False, **options: Any) -> Estimate:
    return estimate(replace(setup_of(LLAMA, where, prompt, is_split, options), adapter=adapter))


def setup_of(model: str, where: str, prompt: int, is_split: bool, options: dict[str, Any]) -> Setup:
    config, *_ = planned({"output_dir": "unused", "report_to": "none", **options})
    count, gpu = gpus(where)
    return Setup(
        args=config, model_config=config_by_name(model), gpu=gpu, gpus=count, is_split=is_split, prompt_tokens=prompt
    )


_PLANS: dict[str, Estimate] = {}


def plan_of(case: Case) -> Estimate:
    if case.name not in _PLANS:
        setup = setup_of(case.model, case.where, case.prompt, case.is_split, case.options)
        if case.tensor_parallel > 1:  # theirs is vLLM beside a model that is split, which Covey refuses
            setup.args.use_vllm, setup.args.vllm_tensor_parallel_size = True, case.tensor_parallel
        _PLANS[case.name] = estimate(replace(setup, mean_tokens=case.mean))
    return _PLANS[case.name]


def part_of(case: Case, plan: Estimate, part: str) -> float:
    """Of one rollout and all updates from it, as the figures are."""
    args = plan.setup.args
    assert args.steps_per_generation is not None
    updates = args.steps_per_generation / args.gradient_accumulation_steps
    if part == "step, asynchronous":
        return updates * plan.seconds.step / float(asynchrony(plan).speed or 1)
    return float(updates * getattr(plan.seconds, part))


if __name__ == "__main__":
    main()
