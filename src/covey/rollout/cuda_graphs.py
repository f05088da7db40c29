"""Steps that are captured once and replayed: CUDA graphs, and what happens where a step cannot be captured."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Capture = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Records a step without running it; what it returns runs the recorded step on the same tensors, and gives its result."""


class Eager:
    """Every step runs as it is written."""

    def run(self, key: Hashable, epoch: int, step: Callable[[], Result]) -> Result:
        """The result of `step`."""
        return step()


class Captured:
    """Steps by key: the first of a key runs as written (kernels are compiled then), the second is captured, the rest replayed.

    A new epoch makes all captures void. When a step cannot be captured, all run as they are written from then on.
    """

    def __init__(self, capture: Capture, refused: Callable[[], None] = lambda: None) -> None:
        """`refused` is called when a step cannot be captured."""
        self.capture, self.refused = capture, refused
        self.reason: str | None = None
        """Why nothing is captured any more."""
        self.epoch = -1
        self.known: dict[Hashable, Callable[[], Any] | None] = {}
        self.num_captured = self.num_replayed = 0

    def run(self, key: Hashable, epoch: int, step: Callable[[], Result]) -> Result:
        """The result of `step`, whose tensors keep their places within an epoch and whose work hangs on `key` alone."""
        if self.reason is not None:
            return step()
        if epoch != self.epoch:
            self.known, self.epoch = {}, epoch
        if key not in self.known:
            self.known[key] = None
            return step()
        replay = self.known[key] or self._captured(key, step)
        if replay is None:
            return step()
        self.num_replayed += 1
        result: Result = replay()
        return result

    def _captured(self, key: Hashable, step: Callable[[], Any]) -> Callable[[], Any] | None:
        try:
            replay = self.capture(step)
        except RuntimeError as error:  # memory that runs out too: the step as written has just fitted
            self.reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self.known = {}
            self.refused()
            logger.warning("Decoding goes on without CUDA graphs: the step cannot be captured (%s).", self.reason)
            return None
        self.known[key] = replay
        self.num_captured += 1
        return replay


@functools.cache
def _stream(device: torch.device) -> Any:
    """One a device: cuBLAS keeps a workspace for each stream that it has seen."""
    return torch.cuda.Stream(device)


class CudaCapture:
    """Captures on one device into one pool of memory, on a stream of its own. What is captured does not run."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, _stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.last: Any = None
        """A pool whose graphs have all died cannot be used again."""

    def __call__(self, step: Callable[[], Any]) -> Callable[[], Any]:
        # torch.cuda.graph would also empty the allocator's cache; "thread_local" lets rewards and loaders use the device.
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                result = step()
            except BaseException:
                _abandon(graph)
                raise
            graph.capture_end()
        self.last = graph

        def replay() -> Any:
            graph.replay()
            return result

        return replay


def _abandon(graph: Any) -> None:
    """End a capture that failed; the driver says again that it did."""
    try:
        graph.capture_end()
    except RuntimeError as error:
        logger.debug("A failed capture ended with: %s", error)
