"""All-reduce of gradients in buckets, overlapped with the backward pass of the last micro-batch.

`torch.nn.parallel.DistributedDataParallel` does this for a module whose forward it wraps, with the same number of backward
passes on every process. Here processes may have different numbers of micro-batches, or none, and one of them may run out of memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

BUCKET_BYTES = 25 * 2**20
"""Bucket size in bytes, DistributedDataParallel's default: smaller ones cost latency, larger ones overlap less."""
_ALIGNED = 64
"""Alignment of gradients in a bucket, in elements: optimizer kernels read vectors."""


class Reduction(Protocol):
    """The collectives that a reduction needs; `World` implements them."""

    @property
    def size(self) -> int: ...

    def start_sum(self, x: Tensor) -> Callable[[], None]:
        """Start an in-place all-reduce (sum) of `x`. The returned callable waits for its end."""

    def wait_for(self, waits: Sequence[Callable[[], None]]) -> None:
        """Wait for all-reduces that were started."""


@dataclass(eq=False)
class _Bucket:
    parameters: list[nn.Parameter]
    missing: set[int] = field(default_factory=set)
    """Indices of parameters that still lack their gradient of the last micro-batch."""
    sums: list[Tensor] = field(default_factory=list)
    """Views of the bucket's tensor, one per parameter: the local gradients, then their sums. Empty: not started."""
    wait: Callable[[], None] = lambda: None


class GradientBuckets:
    """Gradients of `parameters` in one step, summed over processes. Every process creates one for every step.

    Call `overlap_next_backward` before the backward pass of the last micro-batch; `finish` after it, on every process. The buckets and
    their order follow from the parameters alone, so a repeated or resumed step adds in the same order.
    """

    def __init__(self, world: Reduction, parameters: Sequence[nn.Parameter]) -> None:
        self.world, self.parameters = world, list(parameters)
        self.buckets = _buckets(self.parameters, BUCKET_BYTES) if world.size > 1 else []
        self.is_spoiled = False
        """True if gradients were dropped after their all-reduce had started: every process must repeat the step."""
        self._next = 0
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def overlap_next_backward(self) -> None:
        """Start the all-reduce of each bucket as soon as the next backward pass has completed its gradients."""
        for bucket in () if self.is_spoiled else self.buckets:
            bucket.missing = set(range(len(bucket.parameters)))
            for place, parameter in enumerate(bucket.parameters):
                arrived = lambda _, bucket=bucket, place=place: self._arrived(bucket, place)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))

    def drop(self) -> None:
        """Note that the gradients so far were dropped, because the micro-batches are computed again."""
        self._unhook()
        self.is_spoiled = self.is_spoiled or self._next > 0

    def finish(self) -> bool:
        """Replace each gradient by its sum over processes. Returns False, with invalid gradients, if any process dropped some.

        A missing gradient on one process counts as zero. A parameter without gradient on all of them keeps None, as in a world of
        one: an optimizer would still move a parameter with a zero gradient.
        """
        self._unhook()
        if self.world.size == 1 or not self.parameters:
            return True
        while self._next < len(self.buckets):
            self._begin_next()
        flags = torch.zeros(len(self.parameters) + 1, device=self.parameters[0].device)
        flags[:-1] = torch.tensor([float(parameter.grad is not None) for parameter in self.parameters])
        flags[-1] = float(self.is_spoiled)
        read = list[float]()
        waits = [*(bucket.wait for bucket in self.buckets), self.world.start_sum(flags)]
        self.world.wait_for(
            [*waits, lambda: read.extend(flags.tolist())]
        )  # NCCL's all-reduce ends on the device, not in `wait`
        *counts, spoiled = read
        has_gradient = {id(parameter): count > 0 for parameter, count in zip(self.parameters, counts, strict=True)}
        for bucket in self.buckets:
            for parameter, total in zip(bucket.parameters, bucket.sums, strict=True):
                parameter.grad = total if has_gradient[id(parameter)] else None
        return spoiled == 0

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _arrived(self, bucket: _Bucket, place: int) -> None:
        bucket.missing.discard(place)
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._begin_next()  # in the same order on all processes, as collectives require

    def _begin_next(self) -> None:
        """Copy the gradients of a bucket into one tensor and start its all-reduce; the parameters' gradients become views of it."""
        bucket = self.buckets[self._next]
        self._next += 1
        sizes = [-(-parameter.numel() // _ALIGNED) * _ALIGNED for parameter in bucket.parameters]
        whole = bucket.parameters[0].new_zeros(sum(sizes))
        for parameter, part in zip(bucket.parameters, whole.split(sizes), strict=True):
            bucket.sums.append(part[: parameter.numel()].view_as(parameter))
            if parameter.grad is not None:
                parameter.grad = bucket.sums[-1].copy_(parameter.grad)
        bucket.wait = self.world.start_sum(whole)


def _buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Buckets of parameters from the last to the first, the order of the backward pass; one dtype and device per bucket."""
    buckets: list[_Bucket] = []
    sizes: list[int] = []
    open_: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in reversed(parameters):
        kind = parameter.dtype, parameter.device
        if kind not in open_ or sizes[open_[kind]] + parameter.nbytes > bucket_bytes:
            open_[kind] = len(buckets)
            buckets.append(_Bucket([]))
            sizes.append(0)
        buckets[open_[kind]].parameters.append(parameter)
        sizes[open_[kind]] += parameter.nbytes
    return buckets
