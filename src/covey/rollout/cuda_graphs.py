"""CUDA graphs: decode steps captured once and replayed, with eager execution where a step cannot be captured."""

import functools
import logging
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from covey.errors import first_line

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Capture = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Capture function: records a step without running it. The returned callable replays it on the same tensors and returns its result."""


MOST = 256
"""Limit of captured steps. Beyond it all are dropped, so that shapes that do not recur cannot fill the memory."""


class Eager:
    """Eager execution of every step, without capture."""

    nbytes = 0

    def run(self, key: Hashable, epoch: Hashable, step: Callable[[], Result]) -> Result:
        """The result of `step`."""
        return step()


class Captured:
    """Captured steps by key: the first run of a key is eager (kernels are compiled then), the second is captured, later ones replay.

    A new epoch invalidates all captures. Once a step cannot be captured, all later steps run eagerly.
    """

    def __init__(self, capture: Capture, refused: Callable[[], None] = lambda: None) -> None:
        """Takes the capture function; `refused` is called when a step cannot be captured."""
        self.capture, self.refused = capture, refused
        self.reason: str | None = None
        """Reason why steps are no longer captured; None while they are."""
        self.epoch: Hashable = None
        self.replays: dict[Hashable, Callable[[], Any] | None] = {}
        self.num_captured = self.num_replayed = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the memory pool of all captures."""
        return self.capture.nbytes if isinstance(self.capture, CudaCapture) else 0

    def run(self, key: Hashable, epoch: Hashable, step: Callable[[], Result]) -> Result:
        """The result of `step`, whose tensors keep their addresses within an epoch and whose kernels depend on `key` alone."""
        if self.reason is not None:
            return step()
        if epoch != self.epoch or len(self.replays) > MOST:
            self.replays = {}
        self.epoch = epoch  # also if it is equal: tuples of the same objects compare fast
        if key not in self.replays:
            self.replays[key] = None
            return step()
        replay = self.replays[key] or self._captured(key, step)
        if replay is None:
            return step()
        self.num_replayed += 1
        result: Result = replay()
        return result

    def _captured(self, key: Hashable, step: Callable[[], Any]) -> Callable[[], Any] | None:
        try:
            replay = self.capture(step)
        except RuntimeError as error:  # also out of memory: the eager step has just fitted
            self.reason = first_line(error)
            self.replays = {}
            self.refused()
            logger.warning("Decoding goes on without CUDA graphs: the step cannot be captured (%s).", self.reason)
            return None
        self.replays[key] = replay
        self.num_captured += 1
        return replay


@functools.cache
def _stream(device: torch.device) -> Any:
    """The capture stream, one per device: cuBLAS keeps a workspace for each stream that it has seen."""
    return torch.cuda.Stream(device)


class CudaCapture:
    """CUDA graph capture on one device into one memory pool, on a stream of its own. Captured work does not run."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, _stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.last: Any = None
        """The last captured graph: a memory pool cannot be used again once all its graphs are freed."""
        self.nbytes = 0
        """Bytes that captures have added to the pool. The allocator counts them as free, but nothing else can use them."""

    def __call__(self, step: Callable[[], Any]) -> Callable[[], Any]:
        # torch.cuda.graph would also empty the allocator's cache; "thread_local" lets rewards and loaders use the device.
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                result = step()
            except BaseException:
                _abandon(graph)
                raise
            graph.capture_end()
        self.last = graph
        self.nbytes += max(0, torch.cuda.memory_reserved(self.device) - reserved)

        def replay() -> Any:
            graph.replay()
            return result

        return replay


def _abandon(graph: Any) -> None:
    """End a failed capture, for which the driver reports the error a second time."""
    try:
        graph.capture_end()
    except RuntimeError as error:
        logger.debug("A failed capture ended with: %s", error)
