"""Context parallelism on a CPU: bytes of tensors at the peak of a step on one completion, and its seconds, with 1 process and with 2.

    python benchmarks/context.py --tokens 8192 16384

The model has 4 layers, 8 heads and a hidden size of 256; gloo, one core a process. Weights and gradients are not counted: they are
the same. The gradient of two processes is compared with that of one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from covey.process.world import World

PROMPT = 512


def step(tokens: int, world: World, folder: Path) -> dict[str, float]:
    """Forward and backward of one completion, by this process's share."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from covey.learner import Policy
    from covey.learner.live_memory import LiveBytes
    from covey.learner.packing import Row
    from covey.process.context import ContextGroup
    from covey.types import Completion, Prompt

    torch.manual_seed(0)
    shape = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 32}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": tokens}
    auto: Any = AutoModelForCausalLM  # its methods carry no types
    model = auto.from_config(AutoConfig.for_model("qwen3", **shape, **heads)).train()
    context = ContextGroup(world) if world.size > 1 else None
    policy = Policy(model, pad_id=0, context=context, packs_always=True)
    ids = torch.randint(8192, (tokens,), generator=torch.Generator().manual_seed(1))
    prompt = Prompt(uid="0", token_ids=tuple(ids[:PROMPT].tolist()))
    answer = Completion(token_ids=ids[PROMPT:], text="", finish="stop")
    row = Row(prompt, answer, 0, torch.ones(()), torch.ones(tokens - PROMPT, dtype=torch.bool))
    small = replace(row, completion=replace(answer, token_ids=answer.token_ids[:64]))
    policy.measure([small], entropy=True).logp.sum().backward()  # the trials, and what is allocated once
    policy.release()
    model.zero_grad(set_to_none=False)
    started = time.perf_counter()
    with LiveBytes() as live:
        live.begin()
        before = live.now
        measured = policy.measure([row], entropy=True)
        (measured.logp.mean() + 0.01 * measured.entropy.mean()).backward()
        policy.release()
    seconds = time.perf_counter() - started
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    gradient = world.sum(gradient)
    place = folder / f"{tokens}.pt"
    if world.size == 1:
        torch.save(gradient, place)
    one = torch.load(place)
    apart = ((gradient - one).abs().max() / one.abs().max()).item()
    return {"peak_mib": (live.peak - before) / 2**20, "seconds": seconds, "apart": apart}


def work(folder: Path, tokens: list[int]) -> None:
    from covey import GRPOConfig
    from covey.process.world import World

    torch.set_num_threads(1)
    world = World.of(GRPOConfig(str(folder / "none"), use_cpu=True, bf16=False, report_to="none"))
    world = replace(world, context=world.size)
    rows = {count: step(count, world, folder) for count in tokens}
    (folder / f"{world.size}-{world.rank}.json").write_text(json.dumps(rows))


def started(rank: int, size: int, words: list[str]) -> subprocess.Popen:
    """One of `size` processes with torchrun's environment."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if size > 1:
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29544"}
    return subprocess.Popen([sys.executable, __file__, *words], env=env)


def main(tokens: list[int]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size in (1, 2):
            ranks = [started(rank, size, ["--folder", name, "--tokens", *map(str, tokens)]) for rank in range(size)]
            if any(rank.wait() for rank in ranks):
                raise SystemExit("a process failed")
            for count in tokens:
                rows = [json.loads((folder / f"{size}-{rank}.json").read_text())[str(count)] for rank in range(size)]
                largest = {key: max(row[key] for row in rows) for key in rows[0]}
                print(
                    f"{count:>7,} tokens, {size} process(es): {largest['peak_mib']:,.0f} MiB a process, "
                    f"{largest['seconds']:.1f} s, gradient apart by {largest['apart']:.1e}",
                    flush=True,
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    work(options.folder, options.tokens) if options.folder else main(options.tokens)
