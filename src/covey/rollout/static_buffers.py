"""Buffers at fixed addresses that outlive a call of `sample`, and with them the decode steps captured on them."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.process.device import PeakBytes, free_on, held_by_this_process
from covey.process.memory import device_memory, release_under_pressure
from covey.rollout.cuda_graphs import Capture, Captured, CudaCapture, Eager

IDLE_SHARE = 1 / 16
"""Share of a device's memory up to which buffers and captured steps are always kept."""
SPARE_SHARE = 1 / 10
"""Share of memory that larger ones must leave free on top of the learner's peak after an earlier call."""


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


class StaticStates:
    """States of a sampler's calls: that of the last call is kept for the next one, where it leaves the learner enough memory."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.between, self.may_keep = device, MemoryBetweenCalls(device), True
        release_under_pressure(self)

    def restart(self, device: torch.device, captures: bool) -> None:
        """Begin with a new model; `captures`: decode steps are captured as CUDA graphs, until that fails."""
        if device != self.device:
            self.device, self.between = device, MemoryBetweenCalls(device)
        self.captures = captures
        self.new_capture: Callable[[], Capture] = lambda: CudaCapture(device)
        self.idle: StaticState | None = None

    def begin_call(self, version: int) -> StaticState:
        """The state that was kept, else a new one: a call that begins while another one runs has its own."""
        self.between.begin_call(version)
        state, self.idle = self.idle, None
        return state or StaticState(StaticBuffers(self.device), self.new_steps())

    def new_steps(self) -> Eager | Captured:
        return Captured(self.new_capture(), self.refuse) if self.captures else Eager()

    def refuse(self) -> None:
        """Capture no further steps."""
        self.captures = False

    def keep(self, state: StaticState) -> None:
        """Keep the state of an ended call, unless it takes too much memory."""
        self.idle = state if self.may_keep and self.captures and self.between.has_room_for(state) else None

    def end_call(self, version: int) -> None:
        """End a call, all of whose memory but the kept state was freed: that of CUDA graphs is reusable only after `empty_cache()`."""
        if self.idle is None and self.captures and self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.between.end_call(version)

    @property
    def reusable(self) -> int:
        """Bytes of the kept buffers, without the memory pool of captured steps."""
        return 0 if self.idle is None else self.idle.buffers.nbytes - self.idle.steps.nbytes

    def release_memory(self) -> None:
        """Free the kept state, and keep none from now on: memory has run out."""
        self.idle, self.may_keep = None, False


class MemoryBetweenCalls:
    """Peak memory of a device between two sampler calls that have a weight update between them.

    Measured in each process. It decides which buffers are kept and never affects a completion.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._taken: int | None = None
        """None until there was an update."""
        self._peak = PeakBytes(device)
        self._version: int | None = None
        self._held = 0

    def begin_call(self, version: int) -> None:
        """Begin a call with this version of the weights."""
        if self._version not in (None, version):
            self._taken = max(self._taken or 0, self._peak.read() - self._held)

    def end_call(self, version: int) -> None:
        """End a call, after its memory was freed but for what is kept."""
        self._version, self._held = version, held_by_this_process(self.device)
        self._peak.restart()

    def has_room_for(self, static: StaticState) -> bool:
        """True if a call's buffers and captured steps of this size may be kept until the next call."""
        memory = device_memory(self.device)
        if not memory or static.nbytes <= IDLE_SHARE * memory:
            return True
        if self._taken is None:
            return False
        return free_on(self.device) - static.steps.nbytes - self._taken >= SPARE_SHARE * memory
