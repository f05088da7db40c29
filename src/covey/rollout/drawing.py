"""The kernel of draw.cpp, called on torch's memory: tokens drawn from logits where they are."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from covey.compiled import NUMBERS, largest_gap, proven

SOURCE = Path(__file__).with_name("draw.cpp")
BLOCK = 256
"""Tokens whose weights are summed before the drawn one is looked for among them, here as in draw.cpp and by operations."""


class Kernels:
    """For logits in one precision."""

    def __init__(self, found: ctypes.CDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._draw = found.covey_draw
        self._draw.argtypes, self._draw.restype = [*[pointer] * 5, size, size, ctypes.c_double, size], None

    def draw(self, logits: Tensor, uniforms: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Tokens [B] int64 and their log-probabilities [B] float32 under `softmax(scale * logits)`, by `uniforms` [B] in [0, 1).

        `logits` [B, V] are read in place. A row that holds what is not a number has such a log-probability.
        """
        rows, size = logits.shape
        logits, uniforms = logits.contiguous(), uniforms.double().contiguous()
        tokens, logprobs = logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.float32)
        sums = logits.new_empty(rows, -(-size // BLOCK), dtype=torch.float32)
        places = (x.data_ptr() for x in (logits, uniforms, tokens, logprobs, sums))
        self._draw(*places, rows, size, scale, torch.get_num_threads())
        return tokens, logprobs


def kernels_for(logits: Tensor) -> Kernels | None:
    """The kernel for `logits` of this type; None where PyTorch's operations draw."""
    return _verified(logits.dtype) if logits.device.type == "cpu" and logits.dtype in NUMBERS else None


@functools.cache
def _verified(dtype: torch.dtype) -> Kernels | None:
    """The kernel, where it can be compiled and draws what stands at the middle of each token's share, with its log-probability."""
    gap = lambda kernels: _gap(kernels, dtype)
    return proven(SOURCE, (f"NUMBER={NUMBERS[dtype]}",), "Drawing tokens", Kernels, gap, 1e-4, "they differ")


def _gap(kernels: Kernels, dtype: torch.dtype) -> float:
    """The largest difference of tokens and of log-probabilities, as a share of the largest number."""
    size = 2 * BLOCK + 37
    logits = torch.randn(size, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    logs = (logits.double() * 0.8).log_softmax(-1)
    chances = logs.exp()
    tokens = (chances > 1e-5).nonzero().squeeze(-1)
    middles = (chances.cumsum(-1) - chances / 2)[tokens]
    found = kernels.draw(logits.expand(len(tokens), -1), middles, 0.8)
    return largest_gap(found, [tokens.float(), logs[tokens].float()])
