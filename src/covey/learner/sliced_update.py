"""bitsandbytes' update on a CPU, a slice of a parameter at a time: its working space is that of a slice.

There it widens state, gradient and weight of a whole parameter to float32: five times the embedding's size, which is more than
the 8-bit state saves. Blocks of 256 values are quantized apart, so slices of whole blocks give the same numbers bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

SLICE = 2**20
"""Values of a parameter that are updated at a time: 4 MiB in float32."""
BLOCK = 256
"""Values that share a scale of 8-bit state."""


def update_in_slices(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer; one of bitsandbytes updates large parameters on a CPU slice by slice from now on."""
    given: Any = optimizer
    if not type(given).__module__.startswith("bitsandbytes."):
        return optimizer
    whole = given.update_step

    def update_step(group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        state = given.state[p]
        if not _can_be_sliced(p, state):
            whole(group, p, gindex, pindex)
            return
        for part, part_state in _slices(p, state):
            given.state[part] = part_state
            try:
                whole(group, part, gindex, pindex)
            finally:
                del given.state[part]
        state["step"] += 1

    given.update_step = update_step
    return optimizer


def _can_be_sliced(p: Tensor, state: dict[str, Any]) -> bool:
    """A large parameter on a CPU whose state is element by element; a norm of the whole update is not."""
    moments = [state[name] for name in ("state1", "state2") if name in state]
    is_plain = p.is_contiguous() and p.grad is not None and p.grad.is_contiguous()
    is_elementwise = "unorm_vec" not in state and all(moment.numel() == p.numel() for moment in moments)
    return p.device.type == "cpu" and p.numel() > SLICE and is_plain and is_elementwise


def _slices(p: Tensor, state: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Views of the parameter with its gradient, and of its state, which the update writes through."""
    assert p.grad is not None
    for start in range(0, p.numel(), SLICE):
        values, blocks = slice(start, start + SLICE), slice(start // BLOCK, (start + SLICE) // BLOCK)
        part = p.data.view(-1)[values]
        part.grad = p.grad.view(-1)[values]
        yield part, {
            name: value.view(-1)[values] if name.startswith("state") else value[blocks] if name.startswith("absmax") else value
            for name, value in state.items()
        }  # fmt: skip
