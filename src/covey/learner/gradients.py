"""Clipping of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def clip(parameters: Sequence[torch.nn.Parameter], norm: float, limit: float) -> None:
    """Scale gradients with total norm `norm` down to `limit`."""
    if norm <= limit:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(limit / (norm + 1e-6))
