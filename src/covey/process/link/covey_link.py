"""A process group of a trainer (rank 0) and the workers of a server, apart from the groups of either. Tensors go from rank 0 to all.

Imports torch alone, because it runs in the server's environment too.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_ALIGNMENT = 16


def store_at(host: str, port: int, *, size: int, seconds: float, is_master: bool = False) -> Any:
    """The store at which the members of links meet; the master listens, at this address alone.

    Raises OSError for a port in use, RuntimeError if nobody listens.
    """
    listening: dict[str, Any] = {}
    if is_master:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family, backlog=1024) as listener:
            listening["master_listen_fd"] = listener.detach()
    return dist.TCPStore(host, port, size, is_master, timedelta(seconds=seconds), wait_for_workers=False, **listening)


def meeting(store: Any, number: int) -> Any:
    """The part of a store for one link: after a fault its members meet at the next one."""
    return dist.PrefixStore(f"meeting {number}", store)


class Link:
    """One end of the group. After an error in the middle of a message it cannot be used any more."""

    def __init__(self, backend: str, store: Any, *, rank: int, size: int, seconds: float, device: str = "cpu") -> None:
        """Wait for all the others. `seconds`: limit of this and of each collective. Raises RuntimeError past it."""
        self.device = torch.device(device)
        limit = timedelta(seconds=seconds)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self.group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self.group = dist.ProcessGroupGloo(store, rank, size, limit)

    def send(self, messages: Iterable[Mapping[str, torch.Tensor]]) -> None:
        """Send named tensors, each mapping as one block of bytes after a header in JSON; then the end."""
        for tensors in messages:
            header = [
                (name, str(weight.dtype).removeprefix("torch."), weight.shape) for name, weight in tensors.items()
            ]
            text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
            block = torch.cat([_padded(weight) for weight in tensors.values()])
            self._broadcast(torch.tensor([len(text), len(block)]))
            self._broadcast(text)
            self._broadcast(block)
        self._broadcast(torch.zeros(2, dtype=torch.int64))

    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors of `send`, on this end's device."""
        while True:
            text_length, length = self._broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
            if not text_length:
                return
            text = self._broadcast(torch.empty(text_length, dtype=torch.uint8))
            block = self._broadcast(torch.empty(length, dtype=torch.uint8))
            start = 0
            for name, dtype_name, shape in json.loads(bytes(text.tolist())):
                dtype = getattr(torch, dtype_name)
                end = start + torch.Size(shape).numel() * dtype.itemsize
                yield name, block[start:end].view(dtype).view(shape)
                start = end + -end % _ALIGNMENT

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        held = tensor.to(self.device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self.group.broadcast([held], options).wait()
        return held


def _padded(weight: torch.Tensor) -> torch.Tensor:
    """The bytes of a weight, up to the next multiple at which every type may begin."""
    flat = weight.reshape(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % _ALIGNMENT))
