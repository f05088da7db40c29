"""Steps of one GRPO workload on a GPU, on Covey or on TRL: seconds of a step, its parts, memory, and a profile by kernel.

    python benchmarks/gpu_step.py covey --size 0.5b
    python benchmarks/gpu_step.py trl --size 7b --lora 16 --prompts 8 --completion-tokens 256 --micro-batch 8
    python benchmarks/gpu_step.py covey --profile profile.txt     # one step more, under PyTorch's profiler
    python benchmarks/gpu_step.py covey --size tiny --device cpu --prompts 2 --group 2 --completion-tokens 8

Both packages get the same `GRPOConfig`: random weights of Qwen2.5's shapes, prompts of random words, rewards that differ, and nearly
every completion at its full length. The first step compiles and is told apart. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 1_000),
    "0.5b": (896, 4_864, 24, 14, 2, 151_936),
    "1.5b": (1_536, 8_960, 28, 12, 2, 151_936),
    "7b": (3_584, 18_944, 28, 28, 4, 152_064),
}
"""Width, inner width, layers, heads, heads of keys, vocabulary."""
KERNELS_SHOWN, GAPS_SHOWN = 40, 20
LEAST_GAP = 5.0
"""Microseconds between two kernels beyond which the device counts as idle."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=["covey", "trl"])
    parser.add_argument("--size", choices=SHAPES, default="0.5b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    numbers = {"steps": 3, "prompts": 32, "group": 8, "prompt-tokens": 256, "completion-tokens": 512, "micro-batch": 16}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lora", type=int, default=0, help="rank; the weights below are in bfloat16 then")
    parser.add_argument("--profile", type=Path, help="file for the kernels of one step more (Covey only)")
    parser.add_argument("--extra", type=json.loads, default={}, help="options of GRPOConfig as a JSON object")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device, and PyTorch sees none; --device cpu tries the script.")
    if options.profile and options.package != "covey":
        raise SystemExit("--profile looks into Covey's parts; leave it out for TRL.")
    print(json.dumps(run(options)))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each step and of its parts, GiB reserved at most, and totals of the profiled step."""
    began, package = time.perf_counter(), importlib.import_module(options.package)
    is_cuda, total = options.device == "cuda", options.steps + bool(options.profile)
    clock, watch = Clock(is_cuda), Watch(options, is_cuda)
    if options.package == "covey":
        watch.install()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(package, options, folder, total, clock)
        ready = time.perf_counter() - began
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    kept = ("sampling", "entropy", "grad_norm", "loss", "mean_length", "memory")
    steps = clock.seconds[: options.steps]
    return {
        "package": options.package,
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "torch": torch.__version__,
        "ready": round(ready, 1),
        "first": steps[0],
        "step": statistics.median(steps[1:] or steps),
        "steps": steps,
        "parts": watch.parts,
        "reserved_gib": clock.reserved,
        "profile": watch.profiles,
        "last": {key: value for key, value in history[-1].items() if any(word in key for word in kept)},
    }


def trainer_of(package: Any, options: argparse.Namespace, folder: str, total: int, clock: Clock) -> Any:
    model, tokenizer = model_and_tokenizer(options)
    draw = random.Random(0)
    words = lambda: " ".join(f"w{draw.randrange(len(tokenizer) - 3)}" for _ in range(options.prompt_tokens))
    rows = options.prompts * options.group
    micro_batch = min(options.micro_batch, rows)
    config = package.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rows // micro_batch,
        num_generations=options.group,
        max_completion_length=options.completion_tokens,
        max_steps=total,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        beta=0.0,
        learning_rate=1e-6,
        disable_tqdm=True,
        seed=1,
        **({} if options.device == "cuda" else {"use_cpu": True, "bf16": False}) | options.extra,
    )
    adapter = None
    if options.lora:
        from peft import LoraConfig

        adapter = LoraConfig(
            r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    return package.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": words()} for _ in range(options.prompts * total)]),
        callbacks=[clock],
        peft_config=adapter,
        processing_class=tokenizer,
    )


def model_and_tokenizer(options: argparse.Namespace) -> tuple[Any, Any]:
    """Random weights on the device, and a tokenizer of one word a token."""
    hidden, inner, layers, heads, key_heads, vocabulary = SHAPES[options.size]
    words = ["<pad>", "<eos>", "<unk>"] + [f"w{k}" for k in range(vocabulary - 3)]
    by_word = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=by_word, **special)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=options.size != "7b",
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(options.device):
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16 if options.lora else torch.float32)
    return model, tokenizer


def reward(completions: list[str], **columns: Any) -> list[float]:
    """A number that differs within a group and costs nothing."""
    return [float(len(completion) % 7) for completion in completions]


class Clock(TrainerCallback):
    """Seconds of each step, and the memory reserved at most: Covey resets PyTorch's peak of what is allocated within a step."""

    def __init__(self, is_cuda: bool) -> None:
        self.is_cuda, self.began = is_cuda, 0.0
        self.seconds: list[float] = []
        self.reserved: float | None = None

    def on_step_begin(self, *args: Any, **others: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *args: Any, **others: Any) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()
            self.reserved = round(torch.cuda.max_memory_reserved() / 2**30, 2)
        self.seconds.append(round(time.perf_counter() - self.began, 3))
        # all that a cut run leaves
        print(f"step {len(self.seconds)}: {self.seconds[-1]} s, reserved {self.reserved} GiB", flush=True)


class Watch:
    """Seconds of rollout and learner of each of Covey's steps; with `--profile` their kernels in one step more."""

    def __init__(self, options: argparse.Namespace, is_cuda: bool) -> None:
        self.options, self.is_cuda = options, is_cuda
        self.parts: dict[str, list[float]] = {"rollout": [], "learn": []}
        self.profiles: dict[str, dict[str, float]] = {}

    def install(self) -> None:
        from covey.learner import Learner
        from covey.rollout import NativeSampler

        sample = NativeSampler.sample
        Learner.step = self.watched("learn", Learner.step)  # type: ignore[method-assign]
        whole = lambda *args: list(sample(*args))  # the groups of a step, not one by one
        NativeSampler.sample = self.watched("rollout", whole)  # type: ignore[method-assign]

    def watched(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            self.wait()
            began = time.perf_counter()
            if self.options.profile and len(self.parts[part]) == self.options.steps:
                return self.profiled(part, lambda: work(*args, **options))
            out = work(*args, **options)
            self.wait()
            self.parts[part].append(round(time.perf_counter() - began, 3))
            return out

        return run

    def profiled(self, part: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        activity = ProfilerActivity.CUDA if self.is_cuda else ProfilerActivity.CPU  # both take minutes to add up
        with profile(activities=[activity]) as found:
            out = work()
            self.wait()
        wall = time.perf_counter() - began
        events = list(found.key_averages())
        kernels = [event for event in events if event.device_type.name == "CUDA"]
        on_device = lambda event: event.self_device_time_total
        busy, count = sum(map(on_device, kernels)) / 1e6, sum(event.count for event in kernels)
        self.profiles[part] = {"kernel_seconds": round(busy, 4), "launches": count}
        lines = [f"== {part}: {wall:.3f} s under the profiler, kernels {busy:.3f} s, {count} launches"]
        for event in sorted(kernels, key=on_device, reverse=True)[:KERNELS_SHOWN]:
            each = on_device(event) / max(event.count, 1)
            lines.append(f"{on_device(event) / 1e3:10.1f} ms {event.count:7d} x {each:8.1f} us  {event.key[:110]}")
        lines += idle(
            [(e.time_range.start, e.time_range.end, e.key) for e in found.events() if e.device_type.name == "CUDA"]
        )
        lines.append("-- host, self time:")
        host = sorted((e for e in events if e not in kernels), key=lambda e: e.self_cpu_time_total, reverse=True)
        lines += [f"{e.self_cpu_time_total / 1e3:10.1f} ms {e.count:7d}  {e.key[:90]}" for e in host[:16]]
        with self.options.profile.open("a") as file:
            file.write("\n".join(lines) + "\n\n")
        return out

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


def idle(spans: list[tuple[float, float, str]]) -> list[str]:
    """Lines on the time between kernels, `(start, end, name)` in microseconds: how much, and after and before which kernels."""
    gaps, until, last = dict[tuple[str, str], list[float]](), math.inf, ""
    for start, end, name in sorted(spans):
        if start - until > LEAST_GAP:
            gaps.setdefault((last, name), []).append(start - until)
        if end > until or not last:
            until, last = end, name
    whole = sum(map(sum, gaps.values()))
    lines = [f"-- idle: {whole / 1e6:.3f} s in {sum(map(len, gaps.values()))} gaps of more than {LEAST_GAP} us"]
    for (before, after), each in sorted(gaps.items(), key=lambda item: -sum(item[1]))[:GAPS_SHOWN]:
        lines.append(f"{sum(each) / 1e3:10.1f} ms {len(each):7d} x  {before[:60]} -> {after[:60]}")
    return lines


if __name__ == "__main__":
    main()
