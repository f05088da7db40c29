"""Snapshots of tensors in host memory, unaffected by later in-place updates of the originals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def weights_now(model: torch.nn.Module) -> dict[str, Any]:
    """The model's `state_dict` as it is now; tensors tied to each other stay tied.

    Frozen parameters are not copied: nothing changes them, and a base model under an adapter is most of the memory.
    """
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    state = model.state_dict()
    return dict(zip(state, _copy(state, keep=frozen), strict=True))


def _copy(state: Mapping[str, Any], keep: set[str]) -> list[Any]:
    done: dict[tuple[Any, ...], Tensor] = {}
    copies: list[Any] = []
    for name, value in state.items():
        if name in keep or not isinstance(value, Tensor) or value.is_meta:
            copies.append(value)
            continue
        place = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() == 0 or place not in done:
            done[place] = host_copy(value)
        copies.append(done[place])
    return copies


def host_copy(value: Tensor) -> Tensor:
    """The tensor in the host's memory, never sharing any with the original."""
    value = value.detach()
    return value.clone() if value.device.type == "cpu" else value.cpu()


def bytes_to_copy(model: torch.nn.Module, tree: Any) -> int:
    """Bytes of a snapshot of the trained weights and of the tensors in `tree`; tensors inside other objects do not count."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return weights + _bytes_in(tree)


def _bytes_in(tree: Any) -> int:
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, Mapping):
        return sum(map(_bytes_in, tree.values()))
    return sum(map(_bytes_in, tree)) if isinstance(tree, list | tuple) else 0
