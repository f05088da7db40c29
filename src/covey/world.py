"""Other processes: the only file that knows there may be some. A world of one is the same code and does nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from covey.types import Metric, Totals, merge_metrics

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among `size` processes; every method is collective, so every process must call it."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @staticmethod
    def of(args: Any) -> World:
        """The world that `accelerate launch` or `torchrun` set up, seen through `TrainingArguments`."""
        from accelerate import PartialState

        device = args.device  # initialises the process group on first use
        state = PartialState()
        return World(rank=state.process_index, size=state.num_processes, device=device)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """Every `size`-th item, from `rank`: together the processes have each item once."""
        return list(items[self.rank :: self.size])

    def gather(self, items: Sequence[T]) -> list[list[T]]:
        """What each process brought, in the order of ranks, on every process. Sends Python objects: keep them small."""
        if self.size == 1:
            return [list(items)]
        everyone: list[list[T]] = [[] for _ in range(self.size)]
        dist.all_gather_object(everyone, list(items))
        return everyone

    def interleave(self, items: Sequence[T]) -> list[T]:
        """Undo `share`: the items of all processes in their first order."""
        parts = self.gather(items)
        longest = max(len(part) for part in parts)
        return [part[i] for i in range(longest) for part in parts if i < len(part)]

    def sum(self, x: Tensor) -> Tensor:
        """Sum of `x` over processes, on every process."""
        if self.size > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

    def sum_totals(self, totals: Totals) -> Totals:
        """Denominators of the whole optimizer step. `prompts` must already be counted over all processes."""
        if self.size == 1:
            return totals
        counts = torch.tensor([totals.tokens, totals.sequences, totals.nonempty_sequences], device=self.device)
        tokens, sequences, nonempty = self.sum(counts).tolist()
        return replace(totals, tokens=int(tokens), sequences=int(sequences), nonempty_sequences=int(nonempty))

    def merge(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Metrics of all processes, merged exactly."""
        if self.size == 1:
            return dict(metrics)
        return merge_metrics(part[0] for part in self.gather([dict(metrics)]))

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add the gradients of all processes, in place. A parameter without gradient here counts as zero.

        One without gradient on every process keeps none, as in a world of one: an optimizer would not leave a zero alone.
        """
        if self.size == 1:
            return
        parameters = list(parameters)
        flags = torch.tensor([float(parameter.grad is not None) for parameter in parameters], device=self.device)
        for parameter, count in zip(parameters, self.sum(flags).tolist(), strict=True):
            if not count:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor([float(flag)], device=self.device)).item())

    def broadcast(self, item: T) -> T:
        """The main process's item, everywhere."""
        if self.size == 1:
            return item
        box = [item]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Compute in `dtype` where that is safe; None computes in the parameters' own type."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
