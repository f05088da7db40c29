"""A sampler in a separate process with its own copy of the weights: takes orders, generates groups, reloads weights between tokens.

    python -m covey.rollout.worker DESCRIPTOR

serves the connection with this file descriptor until it is closed; `covey.rollout.worker_process` starts it. `Writer` does not
depend on how orders and weights arrive, so it also runs in a Ray actor.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from covey.errors import CoveyError, ModelError
from covey.rollout.backends import choose_sampler
from covey.rollout.engine import NativeSampler
from covey.rollout.sampler import Sampler, SamplingParams
from covey.types import Group, Prompt

ALIGNMENT = 64
"""Alignment of tensors in the shared memory, in bytes."""


@dataclass(frozen=True)
class Order:
    """Request to a worker for groups."""

    number: int
    prompts: tuple[Prompt, ...]
    """Prompts without the columns that only rewards need."""
    n: int
    params: SamplingParams
    at_least: int
    """Oldest weight version with which a group may start."""


@dataclass(frozen=True)
class Setup:
    """Setup of a worker, without the model."""

    options: Mapping[str, Any]
    """Keyword arguments of `choose_sampler`."""
    device: str
    threads: int
    """Intra-op threads of torch on a CPU."""
    in_flight: bool
    """True if running completions continue with newer weights (in-flight updates)."""
    takes_newest: bool = True
    """False: each order is generated with the oldest weights it allows, even if newer ones have arrived, so that a slow worker changes no result."""


class Writer:
    """A sampler that polls for newer weights before an order, and between tokens with in-flight updates."""

    def __init__(
        self, packed: bytes, setup: Setup, version: int, newest: Callable[[], tuple[int, Mapping[str, Tensor]] | None]
    ) -> None:
        """`newest()`, called between tokens, returns version and weights newer than the current ones, or None."""
        torch.set_num_threads(setup.threads)
        self.model, tokenizer = unpacked(packed, setup.device)
        self.places = dict(self.model.named_parameters())
        self.newest, self.in_flight, self.takes_newest = newest, setup.in_flight, setup.takes_newest
        self.version = version
        self.sampler: Sampler = choose_sampler(
            self.model, tokenizer, check_stop=self._between_tokens, **dict(setup.options)
        )
        self.sampler.load(self.model, version)

    def take_newest(self) -> None:
        """Sample with the newest weights from now on; not to be called during a forward pass."""
        if (weights := self.newest()) is not None:
            self._put(*weights)
            self.sampler.load(self.model, self.version)

    def write(self, order: Order) -> Iterator[Group]:
        """The groups of an order, as they finish."""
        if self.takes_newest or self.version < order.at_least:
            self.take_newest()
        yield from self.sampler.sample(order.prompts, order.n, order.params)

    def _between_tokens(self) -> None:
        can_change = self.in_flight and isinstance(self.sampler, NativeSampler) and self.sampler.is_running
        weights = self.newest() if can_change else None
        if weights is not None and isinstance(self.sampler, NativeSampler):
            self._put(*weights)
            self.sampler.change_weights(self.version)

    @torch.no_grad()
    def _put(self, version: int, weights: Mapping[str, Tensor]) -> None:
        for name, value in weights.items():
            self.places[name].copy_(value)
        self.version = version


# -- serialization of the model ---------------------------------------------------------------------------------------


def _left_out(*_: Any, **__: Any) -> None:
    """Placeholder for an unpicklable function that only training calls."""


def _its_place() -> Any:
    return _left_out


class _Pickler(pickle.Pickler):
    """Pickler without local functions: hooks of gradient checkpointing, which sampling does not need."""

    def reducer_override(self, value: Any) -> Any:
        is_local = isinstance(value, FunctionType) and "<" in value.__qualname__
        is_of_training = type(value).__module__.startswith("covey.kernels")
        return (_its_place, ()) if is_local else (_left_out, ()) if is_of_training else NotImplemented


_PICKLE = SimpleNamespace(Pickler=_Pickler, __name__="covey.rollout.worker")


def packed(model: Any, tokenizer: Any) -> bytes:
    """Current model and tokenizer, serialized. Raises ModelError for a model that cannot be pickled."""
    file = io.BytesIO()
    try:
        torch.save({"model": model, "tokenizer": tokenizer}, file, pickle_module=_PICKLE)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied to the process that samples ({error}); leave async_rollouts out."
        ) from error
    return file.getvalue()


def unpacked(sent: bytes, device: str) -> tuple[Any, Any]:
    """Model, on `device`, and tokenizer from the bytes of `packed`."""
    from transformers.dynamic_module_utils import init_hf_modules

    init_hf_modules()  # makes remote code of a model importable by its name
    content = torch.load(io.BytesIO(sent), map_location=device, weights_only=False)  # trusted: written by this run
    model = content["model"].requires_grad_(False).eval()
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if hook is _left_out]:
                del hooks[key]
    return model, content["tokenizer"]


def layout(shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> tuple[dict[str, int], int]:
    """Offset of each tensor in one block of memory, and the size of the block, in bytes."""
    starts: dict[str, int] = {}
    end = 0
    for name, (shape, dtype) in shapes.items():
        starts[name] = end
        size = torch.Size(shape).numel() * dtype.itemsize
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, max(end, ALIGNMENT)


def views(path: str, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
    """Tensors by name in the memory that processes share through the file `path`."""
    starts, size = layout(shapes)
    block = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    out = {}
    for name, (shape, dtype) in shapes.items():
        length = torch.Size(shape).numel() * dtype.itemsize
        out[name] = block[starts[name] : starts[name] + length].view(dtype).view(shape)
    return out


# -- the process ------------------------------------------------------------------------------------------------------


class _Served:
    """One connection: orders and versions of weights in, groups out."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        first = connection.recv()
        self.orders: deque[Order] = deque()
        self.shared = views(first["weights"], first["shapes"])
        self.announced: int | None = None
        self.writer = Writer(connection.recv_bytes(), first["setup"], first["version"], self._newest)
        connection.send(("ready", time.monotonic()))

    def serve(self) -> None:
        """Serve orders until the connection is closed."""
        while True:
            while not self.orders:
                self._receive()
                if self.announced is not None and not self.orders:
                    self.writer.take_newest()
            order = self.orders.popleft()
            while self.writer.version < order.at_least:
                self._receive()
                self.writer.take_newest()
            self.connection.send(("began", order.number, time.monotonic()))
            for group in self.writer.write(order):
                self.connection.send(("group", order.number, _sendable(group)))
            self.connection.send(("done", order.number, time.monotonic()))

    def _receive(self) -> None:
        message = self.connection.recv()
        if isinstance(message, tuple):
            self.orders.append(pickle.loads(message[1]))  # trusted: from the process that started this one
        else:
            self.announced = message

    def _newest(self) -> tuple[int, Mapping[str, Tensor]] | None:
        while self.connection.poll():
            self._receive()
        if self.announced is None:
            return None
        version, self.announced = self.announced, None
        taken = {name: value.clone() for name, value in self.shared.items()}
        self.connection.send(("took", version, time.monotonic()))
        return version, taken


def _sendable(group: Group) -> bytes:
    """The group pickled with the bytes of its tensors: torch would send file descriptors instead."""
    return pickle.dumps(group)


def main() -> None:
    """Serve the connection whose file descriptor is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the training process
    connection = Connection(int(sys.argv[1]))
    try:
        _Served(connection).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the training process has ended
    except BaseException as error:  # noqa: BLE001 - sent to the training process, which raises it
        covey_error = error if isinstance(error, CoveyError) else None
        connection.send(
            (
                "failed",
                type(error).__name__,
                str(error),
                type(covey_error) if covey_error else None,
                traceback.format_exc(),
            )
        )
        os._exit(1)


if __name__ == "__main__":
    from covey.rollout import worker  # pickle needs classes of the module, not of __main__

    worker.main()
