"""The learner on a GPU: a step of 0.5B-shaped random weights in bfloat16, beside padded rows with whole logits, as TRL learns.

    python benchmarks/learner_cuda.py                       # 64 prompts of 512 tokens x 8 completions of up to 1024
    python benchmarks/learner_cuda.py --checkpointing       # activations computed again, on all sides
    python benchmarks/learner_cuda.py --size tiny --prompts 4

Sides: Covey with FlexAttention, Covey with SDPA by part, and the padded one: prompts repeated, right-padded micro-batches of `--rows`,
logits of every completion token in one tensor, log-probability and entropy from them. Float32 weights and AdamW, products in bfloat16,
the same completions, losses and updates; repeats alternate and medians are shown. MFU counts the operations that the mathematics
needs (prompts once a group) against a square product of the same run. The peak is what the allocator gave out at most, less weights
and optimizer state. `--longest N` looks for the longest completion behind one 512-token prompt that goes forward and backward, by doubling
up to N: attention grows with the square, so 524288 tokens take minutes a side.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from covey import algorithms as alg
from covey.errors import ConfigError, MemoryLimitError
from covey.learner import Policy
from covey.learner.packing import Row, pad_rows, rows_of
from covey.learner.preparation import checkpoint_activations
from covey.learner.worst_case import rehearse
from covey.process.memory import is_out_of_memory, release, until_it_fits
from covey.types import Completion, Group, Prompt
from learner import learner_of, operations

SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "vocab_size": 151_936,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 997,
    },
}
Step = Callable[[Sequence[Group]], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="0.5b")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--completion-tokens", type=int, default=1024, help="at most")
    parser.add_argument(
        "--max-tokens", type=int, default=32_768, help="of Covey's micro-batches; halved where too many"
    )
    parser.add_argument("--rows", type=int, default=16, help="of the padded micro-batches; halved where too many")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--longest", type=int, default=0, help="tokens up to which the longest completion is tried; 0: not"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try the script")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "This benchmark needs a CUDA device, and torch finds none; benchmarks/learner.py measures a CPU."
        )
    report(run(given, torch.device(given.device)))


@dataclass(frozen=True)
class Side:
    name: str
    model: Any
    step: Step
    fits: Callable[[int], bool]
    """Whether one completion of so many tokens goes forward and backward."""


def run(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Seconds, peaks and longest completions by side."""
    groups = drawn(given)
    found: dict[str, Any] = {"options": vars(given), "device": _name(device), "sides": {}}
    peak_rate = product(8192 if device.type == "cuda" else 512, device)
    for make in (
        lambda: covey("flex", given, device),
        lambda: covey("sdpa", given, device),
        lambda: padded(given, device),
    ):
        try:
            side = make()
        except ConfigError as error:
            print(error, file=sys.stderr)
            continue
        side.step(groups[:2])  # kernels are compiled, and the optimizer's state exists from here on
        kept = _kept(side.model)
        seconds, peaks = [], []
        for _ in range(given.repeats + 1):
            spent, most = measured(partial(side.step, groups), device)
            seconds.append(spent)
            peaks.append(most - kept)
        step = statistics.median(seconds[1:])
        found["sides"][side.name] = {
            "seconds": seconds[1:],
            "step": step,
            "peak_above_mib": max(peaks[1:]) / 2**20,
            "mfu": operations(side.model, list(groups)) / step / peak_rate,
            "longest": longest(side.fits, given.completion_tokens, given.longest) if given.longest else None,
        }
        print(f"{side.name}: {step:.2f} s a step", file=sys.stderr, flush=True)
        del side
        release()
    found["product"] = peak_rate
    return found


def report(found: dict[str, Any]) -> None:
    print(f"{found['device']}: {found['product'] / 1e12:.1f} TFLOP/s of a square product in bfloat16\n")
    print(
        "| learner | s a step | MFU | peak above weights and optimizer, MiB | longest completion |\n|---|--:|--:|--:|--:|"
    )
    for name, one in found["sides"].items():
        print(
            f"| {name} | {one['step']:.2f} | {one['mfu']:.0%} | {one['peak_above_mib']:.0f} | {one['longest'] or ''} |"
        )
    print(json.dumps(found))


def drawn(given: argparse.Namespace) -> list[Group]:
    """Completions of 10% to all of the length allowed, uniform, with advantages that differ."""
    draw = torch.Generator().manual_seed(0)
    vocabulary, most = SHAPES[given.size]["vocab_size"], given.completion_tokens
    tokens = lambda count: torch.randint(1, vocabulary, (count,), generator=draw)
    groups = []
    for uid in range(given.prompts):
        lengths = torch.randint(max(1, most // 10), most + 1, (given.group,), generator=draw).tolist()
        answers = tuple(Completion(token_ids=tokens(length), text="", finish="stop") for length in lengths)
        prompt = Prompt(uid=str(uid), token_ids=tuple(tokens(given.prompt_tokens).tolist()))
        groups.append(Group(prompt=prompt, completions=answers, advantages=torch.linspace(-1, 1, given.group)))
    return groups


def model_of(given: argparse.Namespace, device: torch.device) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        **SHAPES[given.size], num_key_value_heads=2, max_position_embeddings=2**19, tie_word_embeddings=True
    )
    model: Any = Qwen2ForCausalLM(config)
    model = model.to(device).train()
    if given.checkpointing:
        checkpoint_activations(model)
    return model


def covey(kernel: str, given: argparse.Namespace, device: torch.device) -> Side:
    """Packed rows and logits by chunks. Raises ConfigError where the kernel cannot be had."""
    model = model_of(given, device)
    policy = Policy(model, pad_id=0, compute_dtype=torch.bfloat16, shared_attention=kernel)
    policy.shares_prompts()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-7, fused=True)
    learner = learner_of(
        policy,
        optimizer,
        max_completion_length=given.completion_tokens,
        max_rows=given.prompts * given.group,
        max_tokens=given.max_tokens,
    )

    def fits(length: int) -> bool:
        try:
            rehearse(learner, [one_of(given, length)], alg.dapo())
        except MemoryLimitError:
            return False
        return True

    return Side(f"Covey, {kernel}", model, lambda groups: _discard(learner.step(groups, alg.dapo(), 1)), fits)


def padded(given: argparse.Namespace, device: torch.device) -> Side:
    """Padded rows and whole logits."""
    model = model_of(given, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, fused=True)
    size = [given.rows]

    def halve(said: str) -> None:
        optimizer.zero_grad(set_to_none=True)
        if size[0] == 1:
            raise MemoryLimitError(said)
        size[0] //= 2

    def learn(groups: Sequence[Group]) -> None:
        rows = rows_of(groups)
        total = sum(row.completion.num_tokens for row in rows)
        parts = lambda: [rows[i : i + size[0]] for i in range(0, len(rows), size[0])]
        until_it_fits(lambda: [padded_loss(model, part, device, total).backward() for part in parts()], halve)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def fits(length: int) -> bool:
        try:
            padded_loss(model, rows_of([one_of(given, length)]), device, length).backward()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            optimizer.zero_grad(set_to_none=True)
            release()
        return True

    return Side("padded, whole logits", model, learn, fits)


def padded_loss(model: Any, rows: Sequence[Row], device: torch.device, total: int) -> Tensor:
    """The same loss as `alg.dapo()` on-policy: the mean over tokens of minus the advantage times the ratio."""
    batch = pad_rows(rows, 0, device)
    with torch.autocast(device.type, torch.bfloat16):
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
        logits = logits.flatten(0, 1)[batch.source].float()
    logp = batch.spread(logits.gather(-1, batch.target[:, None]).squeeze(-1) - logits.logsumexp(-1))
    with torch.no_grad():
        chunks = logits.detach().split(128)
        batch.spread(torch.cat([torch.distributions.Categorical(logits=chunk).entropy() for chunk in chunks]))
    mask = batch.spread(torch.ones_like(batch.target, dtype=torch.float32))
    advantages = torch.stack([row.advantage for row in rows])[:, None].to(device)
    return -(advantages * (logp - logp.detach()).exp() * mask).sum() / total


def one_of(given: argparse.Namespace, length: int) -> Group:
    """Two completions, one of a single token, so that the prompt is shared."""
    answers = tuple(
        Completion(token_ids=torch.ones(count, dtype=torch.long), text="", finish="stop") for count in (length, 1)
    )
    prompt = Prompt(uid="0", token_ids=(1,) * given.prompt_tokens)
    return Group(prompt=prompt, completions=answers, advantages=torch.tensor([1.0, -1.0]))


def longest(fits: Callable[[int], bool], start: int, most: int) -> int:
    """The longest power of two times `start` that fits, up to `most`; 0 when `start` does not."""
    length = 0
    while max(2 * length, start) <= most and fits(max(2 * length, start)):
        length = max(2 * length, start)
    return length


def measured(work: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Seconds, and the most bytes that the allocator gave out; 0 on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def product(size: int, device: torch.device) -> float:
    """Operations a second of the best of nine square products in bfloat16."""
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return float(2 * size**3 / min(measured(lambda: _discard(x @ x), device)[0] for _ in range(9)))


def _kept(model: Any) -> int:
    """Bytes of float32 weights and AdamW's two moments."""
    return 3 * sum(parameter.nbytes for parameter in model.parameters())


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _discard(value: object) -> None:
    """A step returns nothing here."""


if __name__ == "__main__":
    main()
