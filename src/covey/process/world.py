"""Collectives of the processes of a run. Only this room knows of other processes; a world of one runs the same code."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from covey.errors import DataError, RankError
from covey.process.device import expect_supported
from covey.process.heartbeat import SILENCE_SECONDS, Heartbeat, leave_now
from covey.process.rendezvous import agree
from covey.process.tensor_bytes import from_bytes, to_bytes
from covey.types import Metric, merge_metrics

T = TypeVar("T")
R = TypeVar("R")
_PULSES: dict[int, Heartbeat] = {}
"""One a process group, by its identity: every world of a process shares it."""


@dataclass(frozen=True)
class World:
    """This process among `size` processes; every method is collective, so every process must call it."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    heartbeat: Heartbeat | None = field(default=None, repr=False, compare=False)
    """Notices when another process is gone; None: every collective waits as long as torch does."""

    @staticmethod
    def of(args: Any) -> World:
        """The world that `accelerate launch` or `torchrun` set up, seen through `TrainingArguments`."""
        from accelerate import PartialState

        device = expect_supported(args.device)  # initialises the process group on first use
        state = PartialState()
        size = int(state.num_processes)
        heartbeat = _pulse_of(state.process_index, size, float(args.ddp_timeout)) if size > 1 else None
        return World(rank=state.process_index, size=size, device=device, heartbeat=heartbeat)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """Every `size`-th item, from `rank`: together the processes have each item once."""
        return list(items[self.rank :: self.size])

    def gather(self, items: Sequence[T]) -> list[list[T]]:
        """Items of each process, in the order of ranks, on every process. Tensors in them are sent as they are and arrive on the CPU."""
        if self.size == 1:
            return [list(items)]
        own = to_bytes(list(items))
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        size = torch.tensor([own.numel()], device=self.device)
        self._meet(lambda: dist.all_gather(sizes, size))
        longest = max(int(one) for one in sizes)
        sent = torch.nn.functional.pad(own, (0, longest - own.numel())).to(self.device)
        everyone = [torch.empty_like(sent) for _ in range(self.size)]
        self._meet(lambda: dist.all_gather(everyone, sent))
        return [from_bytes(one.cpu()) for one in everyone]

    def interleave(self, items: Sequence[T]) -> list[T]:
        """Undo `share`: the items of all processes in their first order."""
        parts = self.gather(items)
        longest = max(len(part) for part in parts)
        return [part[i] for i in range(longest) for part in parts if i < len(part)]

    def sum(self, x: Tensor) -> Tensor:
        """Sum of `x` over processes, on every process."""
        if self.size > 1:
            x = total = x.clone()
            self._meet(lambda: dist.all_reduce(total))
        return x

    def max(self, count: int) -> int:
        """The largest of the processes' counts."""
        if self.size == 1:
            return count
        largest = torch.tensor([count], device=self.device)
        self._meet(lambda: dist.all_reduce(largest, dist.ReduceOp.MAX))
        return int(largest.item())

    def merge(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Metrics of all processes, merged exactly."""
        if self.size == 1:
            return dict(metrics)
        return merge_metrics(part[0] for part in self.gather([dict(metrics)]))

    def start_sum(self, x: Tensor) -> Callable[[], None]:
        """Begin to add `x` over processes in place; `wait_for` what is returned. Every process begins its sums in one order."""
        work = dist.all_reduce(x, async_op=True)
        return lambda: None if work is None else work.wait()

    def wait_for(self, waits: Sequence[Callable[[], None]]) -> None:
        """Wait for sums that were begun with `start_sum`."""
        self._meet(lambda: [wait() for wait in waits])

    def any(self, flag: bool) -> bool:
        """True if the flag is set on any process."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor([float(flag)], device=self.device)).item())

    def broadcast(self, item: T) -> T:
        """The main process's item, everywhere."""
        if self.size == 1:
            return item
        box = [item]
        self._meet(lambda: dist.broadcast_object_list(box, src=0))
        return box[0]

    def barrier(self) -> None:
        if self.size > 1:
            self._meet(dist.barrier)

    def expect_same(self, facts: Mapping[str, Any]) -> None:
        """Raise DataError on every process when a fact is not the same on all: they would wait for each other later."""
        everyone = [part[0] for part in self.gather([dict(facts)])]
        for name in facts:
            values = [one.get(name) for one in everyone]
            for rank, value in enumerate(values):
                if value != values[0]:
                    raise DataError(
                        f"rank {rank} has {value} {name} where rank 0 has {values[0]}; "
                        "give every process the same data and options (each takes its own share by itself)."
                    )

    def hears_stop(self, is_asked: bool) -> bool:
        """True if this process (`is_asked`) or another was asked to stop; no collective: each hears of it within seconds."""
        return is_asked if self.heartbeat is None else self.heartbeat.hears_stop(is_asked)

    def fails_together(self, error: BaseException) -> bool:
        """Tell the others of an error that ends the run here; whether all have it, so that they may meet once more."""
        return self.heartbeat is None or self.heartbeat.fails_together(error)

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Forward and backward passes of a model that is split, in which torch makes collectives of its own.

        Raises RankError where one breaks because another process has ended. One that hangs is noticed after `ddp_timeout` only.
        """
        try:
            yield
        except RuntimeError as error:
            is_broken = isinstance(error, dist.DistError) or "gloo" in str(error)
            if self.heartbeat is None or not is_broken or isinstance(error, RankError):
                raise
            raise self.heartbeat.broken(error) from error

    def _meet(self, call: Callable[[], R]) -> R:
        """A collective. Raises RankError when another process does not come to it."""
        return call() if self.heartbeat is None else self.heartbeat.collective(call)


def is_on_cpu_with_others() -> bool:
    """True if a launcher started several processes where there is no accelerator.

    Unless it is told that a CPU is meant, accelerate then takes each process for the only one.
    """
    has_others = "LOCAL_RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    return has_others and not torch.accelerator.is_available()


def join(*, cpu: bool, backend: str | None, seconds: float) -> None:
    """Make the process group under keys that no earlier attempt of the same launcher wrote; see `covey.process.rendezvous`.

    Does nothing without torchrun's agent (or one that works like it), or where the group is there already. `seconds` is how long a
    process waits for the others. Raises RankError when one does not come.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not dist.is_available() or dist.is_initialized():
        return
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    timeout = timedelta(seconds=seconds)
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    own = dist.PrefixStore(f"covey/{agree(store, rank, size, seconds)}", store)
    cpu = cpu or parse_flag_from_env("ACCELERATE_USE_CPU")  # as transformers decides
    PartialState(cpu=cpu, backend=backend, timeout=timeout, store=own, rank=rank, world_size=size)  # picks the backend


def _pulse_of(rank: int, size: int, patience: float) -> Heartbeat | None:
    """Heartbeat of this process group, started; None where its store cannot be asked from a second thread."""
    group = dist.group.WORLD
    if id(group) not in _PULSES:
        clone = getattr(dist.distributed_c10d._get_default_store(), "clone", None)
        if clone is None:
            return None
        is_gloo = dist.get_backend(group) == "gloo"
        store = _of_this_attempt(clone())
        heartbeat = Heartbeat(
            store, rank, size, silence=min(SILENCE_SECONDS, patience), patience=patience, is_pollable=is_gloo
        )
        _PULSES[id(group)] = heartbeat
        heartbeat.start()
        atexit.register(_leave, heartbeat)
    _PULSES[id(group)].begin()
    return _PULSES[id(group)]


def _of_this_attempt(store: Any) -> Any:
    """The store without what the processes of an earlier attempt said, for a group that the user's own script made.

    Several agents may count their restarts differently; there only `join` helps.
    """
    is_alone = os.environ.get("GROUP_WORLD_SIZE") == "1"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT") if is_alone else None
    return store if attempt is None else dist.PrefixStore(f"attempt-{attempt}", store)


def _leave(heartbeat: Heartbeat) -> None:
    """At the end of the process: say so; one that left a collective behind must not wait for it."""
    error = getattr(sys, "last_value", None)  # what ended the process uncaught
    heartbeat.end(f"ended with {type(error).__name__}: {error}" if error is not None else "has ended before the others")
    heartbeat.stop()
    if heartbeat.is_abandoned:
        leave_now()
    if dist.is_initialized() and dist.get_backend() == "gloo":
        # while Python is still whole: threads of gloo that outlive it abort the process, after a run that ended well
        dist.destroy_process_group()


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Compute in `dtype` where that is safe; None computes in the parameters' own type."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
