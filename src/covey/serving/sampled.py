"""Stops of a rollout whose calls an endpoint answers."""

from typing import Any

from covey.errors import CoveyError
from covey.rollout import NativeSampler


class Watch:
    """Stops of a rollout whose calls are answered on the engine's thread: the run's own are looked for by the thread that waits alone."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.check_stop, self.is_left = sampler, sampler.check_stop, False
        if not isinstance(sampler, NativeSampler):
            sampler.check_stop = self._expect_listeners

    def leave(self) -> None:
        """End the answers that nobody waits for."""
        self.is_left = True

    def end(self) -> None:
        if not isinstance(self.sampler, NativeSampler):
            self.sampler.check_stop = self.check_stop

    def _expect_listeners(self) -> None:
        if self.is_left:
            raise CoveyError("the rollout of this agent is over.")
