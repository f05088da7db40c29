"""Whether an optimizer's state fits, asked before the first update: memory that runs out inside one leaves weights half updated."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from covey.errors import MemoryLimitError
from covey.process.memory import is_out_of_memory, release

_STATES = {torch.optim.Adam: 2, torch.optim.AdamW: 2, torch.optim.Adagrad: 1, torch.optim.RMSprop: 1}
"""Tensors of a parameter's size that each optimizer keeps for it; others are not known, and not asked about."""


def check_room(optimizer: torch.optim.Optimizer) -> None:
    """Allocate, and free again, what the first `optimizer.step()` will allocate; nothing once there is state.

    Where only the working space of the foreach implementation is too much, the optimizer goes parameter by parameter from
    now on, with the same result. Raises MemoryLimitError, before any weight has changed, where the state itself does not fit.
    """
    states = _STATES.get(type(optimizer))
    if states is None or optimizer.state:
        return
    kept = sum(parameter.nbytes for parameter in _trained(optimizer)) * states
    if _fits(optimizer, states, with_space=True):
        return
    if _fits(optimizer, states, with_space=False):
        for group in optimizer.param_groups:
            group["foreach"] = group["fused"] = False
        return
    raise MemoryLimitError(
        f"The state of {type(optimizer).__name__} ({kept / 2**20:,.0f} MiB) does not fit in memory; use an 8-bit optimizer "
        "(optim='adamw_bnb_8bit'), train an adapter (peft_config), or choose a smaller model."
    )


def _trained(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if parameter.grad is not None)


def _fits(optimizer: torch.optim.Optimizer, states: int, with_space: bool) -> bool:
    groups = optimizer.param_groups
    wants_space = with_space and not any(group.get("fused") or group.get("foreach") is False for group in groups)
    held: list[Tensor] = []
    try:
        for parameter in _trained(optimizer):
            held += [torch.empty_like(parameter) for _ in range(states + wants_space)]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    else:
        return True  # without a collection of garbage, which takes longer than many a step
    held.clear()
    release()
    return False
