"""A process group of a trainer (rank 0) and the workers of a server, apart from the groups of either. Tensors go from rank 0 to all.

Between processes of one machine the group only says where they are: `ipc` hands over memory, by CUDA IPC or as memory of the host that both map.
Imports torch alone, because it runs in the server's environment too.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_ALIGNMENT = 16
_CONNECT_SECONDS = 2.0
_FAILED = "failed"
_LOOK_SECONDS = 0.2
"""Interval at which an end that waits looks whether another has failed."""
_EXIT_SECONDS = 5.0
_in_torch: set[threading.Thread] = set()
"""Threads that are in calls of torch again and again, or in a long one."""
_is_exiting = threading.Event()


@atexit.register
def _leave_torch() -> None:
    """Let these threads end first: one that comes back from torch's C++ as Python ends aborts the process, whatever its exit code."""
    _is_exiting.set()
    for thread in [*_in_torch]:
        thread.join(_EXIT_SECONDS)


@contextmanager
def _calling_torch() -> Iterator[None]:
    _in_torch.add(thread := threading.current_thread())
    try:
        yield
    finally:
        _in_torch.discard(thread)


def store_at(host: str, port: int, *, size: int, seconds: float, is_master: bool = False) -> Any:
    """The store at which the members of links meet; the master listens, at this address alone, port 0 being a free one (`store.port`).

    Raises OSError for a port in use, or if nobody listens there.
    """
    listening: dict[str, Any] = {}
    if not is_master:  # a TCPStore would try for several times its limit, and block the server's worker
        try:
            socket.create_connection((host, port), timeout=min(seconds, _CONNECT_SECONDS)).close()
        except OSError as error:
            raise ConnectionError(
                f"{host} port {port} cannot be reached from {socket.gethostname()} ({error})"
            ) from error
    if is_master:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family, backlog=1024) as listener:
            port = listener.getsockname()[1]
            listening["master_listen_fd"] = listener.detach()
    return dist.TCPStore(host, port, size, is_master, timedelta(seconds=seconds), wait_for_workers=False, **listening)


def meeting(store: Any, number: int) -> Any:
    """The part of a store for one link: after a fault its members meet at the next one."""
    return dist.PrefixStore(f"meeting {number}", store)


class Link:
    """One end of the group. After an error of any end it cannot be used any more, and the others raise that error at once."""

    def __init__(self, backend: str, store: Any, *, rank: int, size: int, seconds: float, device: str = "cpu") -> None:
        """Wait for all the others. `seconds`: limit of this and of each collective. Raises RuntimeError past it, or once one has failed.

        `device`: of tensors that are received, and of those that NCCL or CUDA IPC sends. Backends: `gloo`, `nccl`, `ipc`.
        """
        self.device, self.rank, self.size = torch.device(device), rank, size
        self.shares_memory, self.carries = backend == "ipc", torch.device(device if backend == "nccl" else "cpu")
        self.store, self.seconds, limit = store, seconds, timedelta(seconds=seconds)
        self.group: Any = None
        with self.failing():
            store.set(f"here {rank}", "")
            self._wait(lambda: store.check([f"here {end}" for end in range(size)]), "not all ends have come")
            self.group = self._group_of(backend, limit)

    def _group_of(self, backend: str, limit: timedelta) -> Any:
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            return dist.ProcessGroupNCCL(self.store, self.rank, self.size, options)
        return dist.ProcessGroupGloo(self.store, self.rank, self.size, limit)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Context in which an error of this end is one of all ends."""
        try:
            yield
        except BaseException as error:
            self.fail(repr(error))
            raise

    def fail(self, reason: str) -> None:
        """End the waits of all ends with this reason, unless one has failed before. This end cannot be used any more."""
        with suppress(RuntimeError):  # the store is gone, and with it the others
            self.store.compare_set(_FAILED, "", reason)
        held, self.group = [self.group], None

        def drop() -> None:  # the end of a group waits for a collective that has begun
            with _calling_torch():
                held.clear()

        if not _is_exiting.is_set():
            threading.Thread(target=drop, daemon=True).start()

    def _wait(self, is_done: Callable[[], bool], late: str) -> None:
        """Wait until `is_done`. Raises RuntimeError once an end has failed, or past the limit."""
        begun = time.monotonic()
        look = begun + _LOOK_SECONDS
        with _calling_torch():
            while not is_done():
                now = time.monotonic()
                if now > look:
                    look = now + _LOOK_SECONDS
                    self._look()
                    if now > begun + self.seconds:
                        raise RuntimeError(f"{late} within {self.seconds:g} seconds")
                if _is_exiting.is_set():
                    raise RuntimeError("this process ends")
                time.sleep(min(0.005, (now - begun) / 8))

    def _look(self) -> None:
        """Raise RuntimeError with the error of an end that has failed."""
        if self.store.check([_FAILED]):
            raise RuntimeError(self.store.get(_FAILED).decode())

    def _done(self, work: Any) -> None:
        self._wait(work.is_completed, "a collective was not done")
        try:
            work.wait()
        except RuntimeError:
            self._look()  # its reason, where it is that another end has left
            raise

    def send(self, messages: Iterable[Mapping[str, torch.Tensor]]) -> None:
        """Send named tensors, each mapping as one block of bytes after a header in JSON; then the end.

        A block of shared memory is freed once every receiver has copied it.
        """
        with self.failing():
            for header, block, handles in self._blocks(messages):
                self._announce(json.dumps([header, handles]), len(block))
                if handles:
                    self._done(self.group.barrier())
                else:
                    self._broadcast(block)
            self._broadcast(torch.zeros(2, dtype=torch.int64))

    def _blocks(self, messages: Iterable[Mapping[str, torch.Tensor]]) -> Iterator[tuple[list[Any], Any, list[Any]]]:
        """Header, block [bytes] and, where it is shared memory, handles of each message."""
        for tensors in messages:
            header = [
                (name, str(weight.dtype).removeprefix("torch."), weight.shape) for name, weight in tensors.items()
            ]
            place = self.device if self.shares_memory else self.carries
            block, handles = block_of(tensors.values(), place, is_shared=self.shares_memory), []
            if self.shares_memory and len(block):
                handles = [handle_of(block) for _ in range(1, self.size)]  # CUDA counts the readers of each
            yield header, block, handles

    def _announce(self, text: str, length: int) -> None:
        """Send a header and the length of its block."""
        content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self._broadcast(torch.tensor([len(content), length]))
        self._broadcast(content)

    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors of `send`, on this end's device. Raises RuntimeError with the error of another end."""
        while True:
            text_length, length = self._broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
            if not text_length:
                return
            text = self._broadcast(torch.empty(text_length, dtype=torch.uint8))
            header, handles = json.loads(bytes(text.tolist()))
            if handles:
                block = copy_of(handles[self.rank - 1], self.device)
                self._done(self.group.barrier())
            else:
                block = self._broadcast(torch.empty(length, dtype=torch.uint8))
            start = 0
            for name, dtype_name, shape in header:
                dtype = getattr(torch, dtype_name)
                end = start + torch.Size(shape).numel() * dtype.itemsize
                yield name, block[start:end].view(dtype).view(shape)
                start = _aligned(end)

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        held = tensor.to(self.carries)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._done(self.group.broadcast([held], options))
        return held


def handle_of(block: torch.Tensor) -> list[Any]:
    """Handle, as JSON takes it, by which one other process of this machine opens a block [bytes] of uint8, once.

    The block must live until that process has copied it.
    """
    storage = block.untyped_storage()
    if block.is_cuda:
        torch.cuda.synchronize(block.device)  # an event would order other streams too, but only those of this moment
        gpu, parts = str(torch.cuda.get_device_properties(block.device).uuid), storage._share_cuda_()[1:]
    else:
        gpu, parts = "", (storage.filename, len(block))
    return [gpu, *(part.hex() if isinstance(part, bytes) else part for part in parts)]


def copy_of(handle: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Copy, on `device`, of the block behind a handle, which is closed again. Raises RuntimeError where it cannot be opened."""
    gpu, *encoded = handle
    if gpu:
        parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in encoded]
        torch.cuda.init()
        there = range(torch.cuda.device_count())
        numbers = [number for number in there if str(torch.cuda.get_device_properties(number).uuid) == gpu]
        if not numbers:
            raise RuntimeError(f"this process does not see GPU {gpu}, which holds the weights")
        storage = torch.UntypedStorage._new_shared_cuda(numbers[0], *parts)
        opened = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    else:
        opened = torch.from_file(encoded[0], shared=False, size=encoded[1], dtype=torch.uint8)
    copy = torch.empty_like(opened, device=device).copy_(opened)
    for place in {opened.device, copy.device}:
        if place.type == "cuda":
            torch.cuda.synchronize(place)
    return copy


def block_of(weights: Iterable[torch.Tensor], device: torch.device, *, is_shared: bool) -> torch.Tensor:
    """The bytes of the weights in one block, each copied once to where every type may begin. `is_shared`: memory that a handle can name."""
    parts = [weight.reshape(-1).view(torch.uint8) for weight in weights]
    size = sum(_aligned(len(part)) for part in parts)
    if is_shared and size and device.type == "cpu":
        block = _shared_block(size)
    else:
        block = torch.empty(size, dtype=torch.uint8, device=device)
    start = 0
    for part in parts:
        block[start : start + len(part)].copy_(part)
        start += _aligned(len(part))
    return block


def _shared_block(size: int) -> torch.Tensor:
    """[size] uint8 of memory that other processes open by its `filename`, as long as it lives: a kill leaves nothing.

    Torch's own shared memory starts a process, which holds this one's output open as long as a reader lives.
    """
    if not hasattr(os, "memfd_create"):
        raise RuntimeError("this system shares no anonymous memory between processes")
    descriptor = os.memfd_create("covey-weights")
    try:
        os.ftruncate(descriptor, size)
        storage: Any = torch.UntypedStorage.from_file(f"/proc/{os.getpid()}/fd/{descriptor}", True, size)
    except (OSError, RuntimeError):
        os.close(descriptor)
        raise
    block = torch.empty(0, dtype=torch.uint8).set_(storage)
    weakref.finalize(block, os.close, descriptor)
    return block


def _aligned(place: int) -> int:
    """The next place at which every type may begin."""
    return place + -place % _ALIGNMENT
