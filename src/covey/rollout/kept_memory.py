"""Memory of a device that a sampler may keep between its calls, while the learner and others use the device."""

import torch

from covey.process.device import PeakBytes, free_on, held_by_this_process
from covey.process.memory import device_memory
from covey.rollout.static_buffers import StaticState

IDLE_SHARE = 1 / 16
"""Share of a device's memory up to which buffers and captured steps are always kept."""
SPARE_SHARE = 1 / 10
"""Share of memory that larger ones must leave free on top of the learner's peak after an earlier call."""


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
