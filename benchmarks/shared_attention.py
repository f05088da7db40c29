"""The learner's attention of a packed row on a CPU, by its own kernels and by PyTorch's operations, forward and backward.

    OMP_NUM_THREADS=1 python benchmarks/shared_attention.py

Sizes of a head, of groups and of texts are those of the demo, of the benchmarks' models and of longer texts. Processor time,
medians, both sides in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from covey.kernels import shared_attention
from covey.kernels.attention_product import Layout
from covey.kernels.shared_attention import SharedAttention

CASES = {
    "demo": (16, 8, 60, 30, 4, 4, 32),
    "10M": (4, 8, 66, 200, 4, 4, 64),
    "60M": (4, 8, 66, 200, 10, 2, 64),
    "60M, few-shot": (4, 8, 924, 200, 10, 2, 64),
    "long prompts": (2, 8, 4000, 400, 8, 2, 128),
    "long completions": (2, 4, 128, 4000, 8, 2, 128),
}
"""Prompts, completions each, tokens of a prompt, of the longest completion, query heads, heads of keys, width."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    print("| case | numbers | forward, PyTorch / kernels, ms | | backward, ms | |\n|---|---|--:|--:|--:|--:|")
    for name, case in CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            inputs, layouts = drawn(*case, dtype=dtype)
            sides = {"torch": [], "kernels": []}  # type: dict[str, list[tuple[float, float]]]
            for turn in range(given.repeats + 1):
                for side, seconds in sides.items():
                    found = timed(inputs, layouts, side == "kernels")
                    if turn:
                        seconds.append(found)
            middle = {
                side: [statistics.median(part) * 1e3 for part in zip(*seconds, strict=True)]
                for side, seconds in sides.items()
            }
            cells = [
                f"{a:.1f} / {b:.1f} | {a / b:.1f}x" for a, b in zip(middle["torch"], middle["kernels"], strict=True)
            ]
            print(f"| {name} | {str(dtype)[6:]} | {' | '.join(cells)} |", flush=True)


def drawn(
    prompts: int, group: int, length: int, longest: int, heads: int, shared: int, width: int, dtype: torch.dtype
) -> tuple[list[Tensor], tuple[Layout, ...]]:
    """Queries, keys, values and the gradient of the output, and where the texts stand; half of the longest at least."""
    torch.manual_seed(0)
    layouts, start = [], 0
    for _ in range(prompts):
        counts = tuple(torch.randint(longest // 2, longest + 1, (group,)).tolist())
        layouts.append(Layout(start, length, counts))
        start += length + sum(counts)
    make = lambda count: torch.randn(start, count, width).to(dtype).transpose(0, 1)
    return [make(heads), make(shared), make(shared), make(heads)], tuple(layouts)


def timed(inputs: list[Tensor], layouts: tuple[Layout, ...], with_kernels: bool) -> tuple[float, float]:
    """Processor seconds of a forward and of its backward."""
    leaves, gradient = [x.requires_grad_() for x in inputs[:3]], inputs[3]
    kernels: Any = shared_attention
    compiled = kernels.packed_attention_for
    if not with_kernels:
        kernels.packed_attention_for = lambda *_: None
    try:
        started = time.process_time()
        out = SharedAttention.apply(*leaves, layouts, leaves[0].shape[-1] ** -0.5)
        between = time.process_time()
        torch.autograd.grad(out, leaves, gradient)
        return between - started, time.process_time() - between
    finally:
        kernels.packed_attention_for = compiled


if __name__ == "__main__":
    main()
