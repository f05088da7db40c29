"""Size of a gradient, and its clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def grad_norm(parameters: Sequence[torch.nn.Parameter]) -> float:
    """L2 norm of all gradients together; 0 without any."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).item() if gradients else 0.0


def clip(parameters: Sequence[torch.nn.Parameter], norm: float, limit: float) -> None:
    """Scale gradients of this norm down to `limit`."""
    if norm <= limit:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(limit / (norm + 1e-6))
