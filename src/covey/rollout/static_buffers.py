"""Buffers at fixed addresses that outlive a call of `sample`, and with them the decode steps captured on them."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.rollout.cuda_graphs import Captured, Eager


class StaticBuffers:
    """Slabs of device memory by name. A buffer is the beginning of its slab: the same shapes come back at the same addresses.

    So a call computes with the shapes that it would have without earlier calls, bit for bit.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.moves = 0
        """Number of slabs allocated so far; steps captured before the last one are invalid."""
        self._slabs: dict[Hashable, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs.values())

    def full(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype, value: float = 0) -> Tensor:
        """The buffer `name` in this shape, filled with `value`. Its slab is allocated anew if it is too small."""
        size = math.prod(shape)
        if not self._has(name, size, dtype):
            self._slabs[name] = torch.empty(size, dtype=dtype, device=self.device)
            self.moves += 1
        return self._slabs[name][:size].view(tuple(shape)).fill_(value)

    def _has(self, name: Hashable, size: int, dtype: torch.dtype) -> bool:
        slab = self._slabs.get(name)
        return slab is not None and slab.dtype == dtype and len(slab) >= size

    def copied(self, name: Hashable, x: Tensor) -> Tensor:
        """The buffer `name` with the content of `x`, which is no buffer itself."""
        return self.full(name, x.shape, x.dtype).copy_(x)

    def grown(self, name: Hashable, held: Tensor, shape: Sequence[int], value: float = 0) -> Tensor:
        """The buffer `name` in this shape: `held`, a part of it so far, in the first indices of each dimension, `value` elsewhere."""
        if self._has(name, math.prod(shape), held.dtype):
            held = held.clone()  # it lies where the buffer will be filled
        out = self.full(name, shape, held.dtype, value)
        out[tuple(map(slice, held.shape))] = held
        return out


@dataclass(frozen=True, eq=False)
class StaticState:
    """State of decode steps on static buffers: one call of `sample` has it at a time."""

    buffers: StaticBuffers
    steps: Eager | Captured

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers and of the memory pool of the captured steps."""
        return self.buffers.nbytes + self.steps.nbytes
