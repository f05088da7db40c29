"""Activation offloading: tensors that autograd saves wait in the host's memory and come back with their sizes and strides."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A saved tensor on the host. Dimensions of stride 0, as `expand` makes them, have one element there."""

    host: Tensor
    size: torch.Size
    device: torch.device


def offloaded(*, pins: bool) -> saved_tensors_hooks:
    """Context in which saved tensors are moved to the host, and back for the backward pass.

    `torch.autograd.graph.save_on_cpu` brings them back contiguous, and compiled kernels assert the strides that they saved.
    Parameters stay where they are: they keep their memory anyway. `pins`: copy through page-locked memory.
    """

    def pack(tensor: Tensor) -> Tensor | _Waiting:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        sizes = [1 if step == 0 else count for count, step in zip(tensor.size(), tensor.stride(), strict=True)]
        once = tensor.as_strided(sizes, tensor.stride())
        if torch._debug_has_internal_overlap(once) == 1:  # several indices of one element: no copy has such strides
            return tensor
        host = torch.empty_strided(once.size(), once.stride(), dtype=tensor.dtype, pin_memory=pins)
        return _Waiting(host.copy_(once), tensor.size(), tensor.device)

    def unpack(packed: Tensor | _Waiting) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        host = packed.host
        back = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=packed.device)
        return back.copy_(host, non_blocking=pins).expand(packed.size)

    return saved_tensors_hooks(pack, unpack)
