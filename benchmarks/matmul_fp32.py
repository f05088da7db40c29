"""float32 matmuls of the sampler, weights read in place, by Covey's kernels and by PyTorch: GFLOP/s.

    python benchmarks/matmul_fp32.py

Rows are completions that decode together. 64 MB of weights are used in rotation, so that they come from memory as a model's do.
Medians of seven, both sides alternating; only on processors for which `covey/kernels/cpp/matmul_fp32.cpp` is written.
"""

from __future__ import annotations

import time

import torch
from torch.nn import functional as F

import rollout
from covey.kernels import matmul_fp32 as live

ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
SIZES = ((640, 896), (640, 2048), (2048, 640), (640, 4096), (256, 1024), (1024, 256))
"""Inputs and outputs of the benchmarks' models."""
BYTES = 64e6


def main() -> None:
    kernels = live.fp32_matmul()
    if kernels is None:
        raise SystemExit("There are no such kernels for this processor, or no compiler.")
    print(f"PyTorch / kernels, {torch.get_num_threads()} threads")
    print("| rows | " + " | ".join(f"{inside} x {outside}" for inside, outside in SIZES) + " |")
    print("|--:|" + "--:|" * len(SIZES))
    for rows in ROWS:
        cells = [" / ".join(f"{rate:.0f}" for rate in rates(kernels, rows, *size)) for size in SIZES]
        print(f"| {rows} | {' | '.join(cells)} |", flush=True)


def rates(kernels: live.Fp32Matmul, rows: int, inside: int, outside: int) -> list[float]:
    """GFLOP/s of PyTorch and of the kernels."""
    weights = [torch.randn(outside, inside) for _ in range(max(1, round(BYTES / (4 * inside * outside))))]
    x = torch.randn(rows, inside)
    sides = {
        "PyTorch": lambda seed: len([F.linear(x, weight) for weight in weights]),
        "kernels": lambda seed: len([kernels.multiply(x, weight) for weight in weights]),
    }
    found = rollout.measure(sides, 7, time.perf_counter)
    return [2 * rows * inside * outside * len(weights) / side["seconds"] / 1e9 for side in found.values()]


if __name__ == "__main__":
    main()
