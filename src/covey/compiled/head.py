"""The kernels of head.cpp, called on torch's memory: log-probability and entropy of logits, and the gradient in their place."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from covey.compiled import NUMBERS, largest_gap, proven

SOURCE = Path(__file__).with_name("head.cpp")


class Kernels:
    """For logits [m, V] in one precision, contiguous; everything else is [m], float32, targets int64."""

    def __init__(self, found: ctypes.CDLL) -> None:
        pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        self._score, self._backward = found.covey_score, found.covey_score_backward
        self._score.argtypes = [pointer] * 5 + [size, size, real, size]
        self._backward.argtypes = [pointer] * 6 + [size, size, real, size]
        self._score.restype = self._backward.restype = None

    def score(
        self, logits: Tensor, targets: Tensor, scale: float, logp: Tensor, normalizer: Tensor, entropy: Tensor
    ) -> None:
        """Of `softmax(scale * logits)`: each target's log-probability, the log of the sum, the entropy in nats, written."""
        self._score(
            logits.data_ptr(), targets.data_ptr(), logp.data_ptr(), normalizer.data_ptr(), entropy.data_ptr(),
            *logits.shape, scale, torch.get_num_threads(),
        )  # fmt: skip

    def backward(
        self,
        logits: Tensor,
        targets: Tensor,
        scale: float,
        normalizer: Tensor,
        entropy: Tensor,
        of_logp: Tensor | None,
        of_entropy: Tensor | None,
    ) -> None:
        """The gradient of `logits`, in their place, from those of log-probability and entropy."""
        self._backward(
            logits.data_ptr(), targets.data_ptr(), normalizer.data_ptr(), entropy.data_ptr(),
            None if of_logp is None else of_logp.data_ptr(), None if of_entropy is None else of_entropy.data_ptr(),
            *logits.shape, scale, torch.get_num_threads(),
        )  # fmt: skip


def kernels_for(weight: Tensor) -> Kernels | None:
    """The kernels for logits in the type of the head's `weight`; None where PyTorch's operations are taken."""
    return _verified(weight.dtype) if weight.device.type == "cpu" and weight.dtype in NUMBERS else None


@functools.cache
def _verified(dtype: torch.dtype) -> Kernels | None:
    """The kernels, where they can be compiled and give what PyTorch's operations give."""
    most = 1e-5 if dtype == torch.float32 else 2e-2
    gap = lambda kernels: _gap(kernels, dtype)
    return proven(SOURCE, (f"NUMBER={NUMBERS[dtype]}",), "Reading logits", Kernels, gap, most, "they differ")


def _gap(kernels: Kernels, dtype: torch.dtype) -> float:
    """The largest difference to the formulas in float32, of values and of gradients, as a share of the largest number."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 37, generator=generator).mul(4).to(dtype)
    targets = torch.tensor([0, 36, 17])
    slopes = torch.randn(2, 3, generator=generator)
    logs = (logits.float() * 0.8).log_softmax(-1)
    chances = logs.exp()
    entropy = -(chances * logs).sum(-1)
    own = torch.nn.functional.one_hot(targets, 37)
    gradient = 0.8 * (slopes[0, :, None] * (own - chances) - slopes[1, :, None] * chances * (logs + entropy[:, None]))
    expected = [logs[range(3), targets], (logits.float() * 0.8).logsumexp(-1), entropy, gradient]
    logp, normalizer, spread = torch.empty(3, 3)
    kernels.score(logits, targets, 0.8, logp, normalizer, spread)
    kernels.backward(logits, targets, 0.8, normalizer, spread, slopes[0], slopes[1])
    found = [logp, normalizer, spread, logits]
    return largest_gap(found, expected)
