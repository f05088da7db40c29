"""Collectives of the processes of a run. Only this room uses `torch.distributed`; a world of one runs the same code."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from covey.errors import ConfigError, DataError, RankError, first_line
from covey.process.device import expect_supported
from covey.process.heartbeat import SILENCE_SECONDS, Heartbeat, leave_now
from covey.process.rendezvous import agree
from covey.process.tensor_bytes import from_bytes, to_bytes
from covey.types import Metric, merge_metrics

T = TypeVar("T")
R = TypeVar("R")
_LOOK_SECONDS = 0.05
_HEARTBEATS: dict[int, Heartbeat] = {}
"""Heartbeat by `id` of the process group, shared by all `World`s of a process."""


@dataclass(frozen=True)
class World:
    """Rank and size of the process group; every method is collective, so every process must call it."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    heartbeat: Heartbeat | None = field(default=None, repr=False, compare=False)
    """Detects lost processes; None: every collective waits as long as torch does."""
    context: int = 1
    """Neighbouring processes that have the same items and compute each together (context parallelism)."""

    @staticmethod
    def of(args: Any) -> World:
        """The process group of `accelerate launch` or `torchrun`, by `TrainingArguments`."""
        from accelerate import PartialState

        device = expect_supported(args.device)  # initialises the process group on first use
        state = PartialState()
        size = int(state.num_processes)
        heartbeat = _heartbeat_of(state.process_index, size, float(args.ddp_timeout)) if size > 1 else None
        return World(rank=state.process_index, size=size, device=device, heartbeat=heartbeat)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """Every `size`-th item, from `rank`: together the processes have each item once; those of one context the same ones."""
        return list(items[self.rank // self.context :: self.size // self.context])

    def gather(self, items: Sequence[T]) -> list[list[T]]:
        """Items of each process, in the order of ranks, on every process. Tensors in them keep their dtype and arrive on the CPU.

        Of processes with the same items (`context`), those of the first.
        """
        if self.size == 1:
            return [list(items)]
        packed = to_bytes(list(items))
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        size = torch.tensor([packed.numel()], device=self.device)
        self._meet(lambda: dist.all_gather(sizes, size))
        longest = max(int(num_bytes) for num_bytes in sizes)
        sent = torch.nn.functional.pad(packed, (0, longest - packed.numel())).to(self.device)
        everyone = [torch.empty_like(sent) for _ in range(self.size)]
        self._meet(lambda: dist.all_gather(everyone, sent))
        return [from_bytes(part.cpu()) for part in everyone[:: self.context]]

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
        """Start an in-place all-reduce (sum) of `x`; pass the result to `wait_for`. All processes must start them in the same order."""
        work = dist.all_reduce(x, async_op=True)
        return lambda: None if work is None else work.wait()

    def wait_for(self, waits: Sequence[Callable[[], None]]) -> None:
        """Wait for all-reduces started by `start_sum`."""
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
        """Raise DataError on every process if a fact differs between processes, which would cause a deadlock later."""
        everyone = [part[0] for part in self.gather([dict(facts)])]
        for name in facts:
            values = [rank_facts.get(name) for rank_facts in everyone]
            for rank, value in enumerate(values):
                if value != values[0]:
                    raise DataError(
                        f"rank {rank} has {value} {name} where rank 0 has {values[0]}; "
                        "give every process the same data and options (each takes its own share by itself)."
                    )

    @property
    def can_post(self) -> bool:
        """True if processes can leave each other texts without a collective."""
        return self.heartbeat is not None

    def post(self, key: str, text: str) -> None:
        """Leave a text for other processes. Not collective; on any thread. Raises RankError if the store is gone."""
        assert self.heartbeat is not None
        try:
            self.heartbeat.store.set(f"covey/post/{key}", text)
        except RuntimeError as error:
            raise RankError(_no_store(error)) from error

    def await_post(self, key: str, rank: int) -> str:
        """Wait for the text that process `rank` leaves. Not collective; on any thread. Raises RankError if it ends without leaving it."""
        assert self.heartbeat is not None
        store, name = self.heartbeat.store, f"covey/post/{key}"
        try:
            while not store.check([name]):
                has_left = self.heartbeat.has_left(rank)  # before the last look: a process leaves its text, then ends
                if has_left and not store.check([name]):
                    raise RankError(f"rank {rank} ended before.")
                time.sleep(_LOOK_SECONDS)
            return store.get(name).decode()
        except RuntimeError as error:
            if isinstance(error, RankError):
                raise
            raise RankError(_no_store(error)) from error

    def publish_stop(self, is_requested: Callable[[], bool]) -> None:
        """Let the other processes hear of a stop within seconds of `is_requested()`, also while this one waits for them."""
        if self.heartbeat is not None:
            self.heartbeat.is_stop_requested = is_requested

    def hears_stop(self, is_requested: bool) -> bool:
        """True if this process (`is_requested`) or another was asked to stop. Not collective: known to all within seconds."""
        return is_requested if self.heartbeat is None else self.heartbeat.hears_stop(is_requested)

    def fails_together(self, error: BaseException) -> bool:
        """Publish an error that ends the run here. Returns True if all processes have one, so that collectives are still possible."""
        return self.heartbeat is None or self.heartbeat.fails_together(error)

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Context for forward and backward passes of a sharded model, in which FSDP runs collectives of its own.

        Raises RankError if one breaks because another process has ended. A hang is noticed only after `ddp_timeout`.
        """
        try:
            yield
        except RuntimeError as error:
            is_broken = isinstance(error, dist.DistError) or "gloo" in str(error)
            if self.heartbeat is None or not is_broken or isinstance(error, RankError):
                raise
            raise self.heartbeat.broken(error) from error

    def _meet(self, call: Callable[[], R]) -> R:
        """Result of a collective. Raises RankError if another process does not take part."""
        return call() if self.heartbeat is None else self.heartbeat.collective(call)


def _no_store(error: RuntimeError) -> str:
    return f"the process that holds the store of messages has ended ({first_line(error)})."


def has_several_processes() -> bool:
    """True if this process is one of a process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_on_cpu_with_others() -> bool:
    """True if a launcher started several processes where there is no accelerator.

    Unless `use_cpu` is set, accelerate then treats each process as the only one.
    """
    has_others = "LOCAL_RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    return has_others and not torch.accelerator.is_available()


@contextmanager
def starting_on_a_free_port() -> Iterator[None]:
    """Context in which a process group is created. Raises ConfigError if another program listens on the main process's port.

    So it does where a launcher's variables are there in part.
    """
    try:
        yield
    except ValueError as error:
        if "environment variable" not in str(error):
            raise
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        raise ConfigError(
            f"LOCAL_RANK={os.environ.get('LOCAL_RANK')} says that a launcher started this process, but {' and '.join(missing)} "
            "are not set; unset LOCAL_RANK for a run of one process, or start it with torchrun or accelerate launch."
        ) from error
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = int(os.environ.get("MASTER_PORT", "29500"))
        raise ConfigError(
            f"port {port} (MASTER_PORT), where the processes of this run were to meet, is in use on this machine, perhaps by "
            f"another run; give the launcher another one, such as torchrun --master_port {port + 1}, or MASTER_PORT={port + 1} on "
            "every process."
        ) from error


def join(*, cpu: bool, backend: str | None, seconds: float) -> None:
    """Create the process group under keys unused by earlier attempts of the same launcher; see `covey.process.rendezvous`.

    Does nothing without torchrun's agent (or one that works like it), or if the group exists already. `seconds` is the timeout for
    the other processes. Raises RankError if one does not arrive.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not dist.is_available() or dist.is_initialized():
        return
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    timeout = timedelta(seconds=seconds)
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    prefixed = dist.PrefixStore(f"covey/{agree(store, rank, size, seconds)}", store)
    cpu = cpu or parse_flag_from_env("ACCELERATE_USE_CPU")  # as in transformers
    PartialState(cpu=cpu, backend=backend, timeout=timeout, store=prefixed, rank=rank, world_size=size)


def _heartbeat_of(rank: int, size: int, patience: float) -> Heartbeat | None:
    """Started heartbeat of this process group; None if its store cannot be used from a second thread."""
    group = dist.group.WORLD
    if id(group) not in _HEARTBEATS:
        clone = getattr(dist.distributed_c10d._get_default_store(), "clone", None)
        if clone is None:
            return None
        is_gloo = dist.get_backend(group) == "gloo"
        store = _of_this_attempt(clone())
        heartbeat = Heartbeat(
            store, rank, size, silence=min(SILENCE_SECONDS, patience), patience=patience, is_pollable=is_gloo
        )
        _HEARTBEATS[id(group)] = heartbeat
        heartbeat.start()
        atexit.register(_leave, heartbeat)
    _HEARTBEATS[id(group)].begin()
    return _HEARTBEATS[id(group)]


def _of_this_attempt(store: Any) -> Any:
    """The store without the keys of earlier attempts, for a process group that the user's script made.

    Several agents may count restarts differently; only `join` covers that.
    """
    is_alone = os.environ.get("GROUP_WORLD_SIZE") == "1"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT") if is_alone else None
    return store if attempt is None else dist.PrefixStore(f"attempt-{attempt}", store)


def _leave(heartbeat: Heartbeat) -> None:
    """Exit handler: publish the end; with an abandoned collective, exit without joining threads."""
    error = getattr(sys, "last_value", None)  # the uncaught exception, if any
    heartbeat.end(f"ended with {type(error).__name__}: {error}" if error is not None else "has ended before the others")
    heartbeat.stop()
    if heartbeat.is_abandoned:
        leave_now()
    if dist.is_initialized() and dist.get_backend() == "gloo" and "vllm" not in sys.modules:
        # before interpreter shutdown: surviving threads of gloo would abort the process after a successful run. vLLM's own exit
        # handler, which runs later, destroys its groups and this one
        dist.destroy_process_group()


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast context in `dtype`; None: a no-op."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
