"""The learner alone: floating-point operations a second of a step, beside matrix products of the same run and type.

    python benchmarks/learner.py --size 60m --bf16

4 prompts x 8 completions of GSM8K-like lengths, every completion with an advantage. Operations are those that the mathematics needs
(6 a parameter and token, prompts once a group, attention apart), so whatever is computed twice counts against the learner. The
peak is the faster of a square product and one of the model's own shape. `--cpu-time` as in `rollout.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

import rollout
from covey import algorithms as alg
from covey.kernels import training_heap
from covey.learner import Learner, NoReference, Policy
from covey.learner.memory_estimate import CPU_ENOUGH, CPU_TOKENS
from covey.learner.out_of_memory import BatchLimits
from covey.process.world import World
from covey.types import Completion, Group, Prompt


def learner_of(
    policy: Policy, optimizer: torch.optim.Optimizer, *, max_completion_length: int, **sizes: Any
) -> Learner:
    """A learner of one process without reference, at a constant rate, on a heap as runs have it; `sizes` as of `BatchLimits`."""
    training_heap(returns_blocks=False)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return Learner(
        policy=policy,
        reference=NoReference(),
        optimizer=optimizer,
        scheduler=scheduler,
        world=World(),
        max_completion_length=max_completion_length,
        limits=BatchLimits(**sizes),
    )


def as_in_runs() -> dict[str, Any]:
    """What `max_tokens_per_microbatch="auto"` means on a CPU with memory to spare."""
    return {"max_tokens": CPU_TOKENS, "enough_tokens": CPU_ENOUGH}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=rollout.SHAPES, default="60m")
    parser.add_argument("--bf16", action="store_true", help="products in bfloat16, as bf16=True trains")
    parser.add_argument("--prompt", type=int, default=66)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    given = parser.parse_args()
    now = time.process_time if given.cpu_time else time.perf_counter
    model, _ = rollout.trained(given.size, 120 if given.size == "10m" else 60)
    policy = Policy(model, pad_id=0, compute_dtype=torch.bfloat16 if given.bf16 else None)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-7, fused=True)
    learner = learner_of(policy, optimizer, max_completion_length=200, max_rows=32, **as_in_runs())
    groups = drawn(given.prompt, model.config.vocab_size)
    work = lambda: learner.step(groups, alg.dapo(), 1)
    seconds = [timed(work, now) for _ in range(given.repeats + 1)][1:]
    needed, step = operations(model, groups), statistics.median(seconds)
    rate = needed / step
    peak = max(
        product(2048, 2048, 2048, given.bf16, now),
        product(3072, model.config.hidden_size, model.config.intermediate_size, given.bf16, now),
    )
    print(
        f"{given.size}, {'bfloat16' if given.bf16 else 'float32'} products, {torch.get_num_threads()} thread(s): {step:.2f} s a step, "
        f"{rate / 1e9:.0f} GFLOP/s of {peak / 1e9:.0f} ({rate / peak:.0%})"
    )
    print(json.dumps({"seconds": seconds, "operations": needed, "peak": peak, "options": vars(given)}))


def drawn(prompt: int, vocabulary: int) -> list[Group]:
    """Four groups of eight, 20 to 200 tokens each, 85 in the middle."""
    draw = random.Random(0)
    torch.manual_seed(0)
    groups = []
    for uid in range(4):
        lengths = [min(200, max(20, round(draw.lognormvariate(4.45, 0.5)))) for _ in range(8)]
        answers = tuple(
            Completion(token_ids=torch.randint(1, vocabulary, (length,)), text="", finish="stop") for length in lengths
        )
        ids = tuple(torch.randint(1, vocabulary, (prompt,)).tolist())
        judged = torch.linspace(-1, 1, 8)
        groups.append(Group(prompt=Prompt(uid=str(uid), token_ids=ids), completions=answers, advantages=judged))
    return groups


def operations(model: PreTrainedModel, groups: list[Group]) -> float:
    """Forward and backward: 6 a weight and token in the blocks, where a completion's last is not needed, 6 a weight of the head and
    completion token, 12 D c a layer for attention over c tokens of context."""
    config: Any = model.config
    blocks = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    head = config.vocab_size * config.hidden_size
    total = 0.0
    for group in groups:
        prompt = len(group.prompt.token_ids)
        contexts = prompt * (prompt + 1) / 2.0
        for completion in group.completions:
            count = completion.num_tokens - 1
            total += 6 * count * blocks + 6 * completion.num_tokens * head
            contexts += count * prompt + count * (count + 1) / 2
        total += 6 * prompt * blocks + 12 * config.num_hidden_layers * config.hidden_size * contexts
    return total


def product(rows: int, inside: int, outside: int, is_half: bool, now: Callable[[], float]) -> float:
    """Operations a second of the best of nine products."""
    dtype = torch.bfloat16 if is_half else torch.float32
    x, weight = torch.randn(rows, inside, dtype=dtype), torch.randn(outside, inside, dtype=dtype)
    work = lambda: torch.nn.functional.linear(x, weight)
    seconds = [timed(work, now) for _ in range(9)]
    return 2 * rows * inside * outside / min(seconds)


def timed(work: Callable[[], object], now: Callable[[], float]) -> float:
    started = now()
    work()
    return now() - started


if __name__ == "__main__":
    main()
