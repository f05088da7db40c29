"""Trials of compiled kernels against PyTorch's operations, on random numbers."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from covey.errors import first_line
from covey.process.memory import is_out_of_memory


def outcome(trial: Callable[[], float]) -> float | str:
    """Result of a trial, such as its `relative_gap`; the error in brackets where it fails. Out of memory is raised."""
    try:
        return trial()
    except Exception as error:  # a compiler fails in many ways; PyTorch's operations do the same work
        if is_out_of_memory(error):
            raise
        return f"({type(error).__name__}: {first_line(error)[:200]})"


def relative_gap(results: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Largest relative error of any pair, in the Euclidean norm; NaN if any is."""
    pairs = ((mine.double(), other.double()) for mine, other in zip(results, expected, strict=True))
    return float(torch.stack([(mine - other).norm() / other.norm() for mine, other in pairs]).max())
