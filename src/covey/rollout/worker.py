"""A sampler in a separate process with its own copy of the weights: takes orders and calls, generates groups, reloads weights between tokens.

    python -m covey.rollout.worker DESCRIPTOR

serves the connection with this file descriptor until it is closed; `covey.rollout.worker_process` starts it. `Writer` does not
depend on how orders and weights arrive, so it also runs in a Ray actor.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from covey.errors import CoveyError
from covey.process.memory import is_out_of_memory, release
from covey.rollout.backends import choose_sampler
from covey.rollout.calls import CallScheduler, decoding, scheduler_of
from covey.rollout.engine import NativeSampler
from covey.rollout.environments import Environment, Reply, Turn
from covey.rollout.live import LiveRequest
from covey.rollout.model_copies import unpacked, views
from covey.rollout.sampler import SamplingParams
from covey.types import Group, Prompt


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
class Replies:
    """Replies of an environment of the training process to the turns that a worker asked about."""

    values: tuple[Reply, ...]


@dataclass(frozen=True)
class Call:
    """Single request of an agent, with the weights that the worker has."""

    number: int
    request: LiveRequest


@dataclass(frozen=True)
class Cancelled:
    """A call that nobody waits for."""

    number: int


ToWorker: TypeAlias = Order | Replies | Call | Cancelled


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
    has_turns: bool = False
    """True if an environment of the training process may reply to a completion that ends."""
    has_calls: bool = False
    """True if an order has no prompts, but is followed by the calls of agents."""


class Writer:
    """A sampler that polls for newer weights before an order, and between tokens with in-flight updates."""

    def __init__(
        self,
        packed: bytes,
        setup: Setup,
        version: int,
        newest: Callable[[], tuple[int, Mapping[str, Tensor]] | None],
        ask: Environment | None = None,
    ) -> None:
        """`newest()`, called between tokens, returns version and weights newer than the current ones, or None.

        `ask`: asks the training process for an environment's replies.
        """
        torch.set_num_threads(setup.threads)
        self.model, tokenizer = unpacked(packed, setup.device)
        self.places = dict(self.model.named_parameters())
        self.newest, self.in_flight, self.takes_newest = newest, setup.in_flight, setup.takes_newest
        self.version = version
        options = dict(setup.options) | ({"environment": ask} if setup.has_turns else {})
        self.sampler: Any = None  # a sampler asks between the tokens of its trials, before it is chosen
        self.sampler = choose_sampler(self.model, tokenizer, check_stop=self._between_tokens, **options)
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
        if order.prompts:
            yield from self.sampler.sample(order.prompts, order.n, order.params)

    def answer(self, calls: deque[Call | Cancelled], poll: Callable[[], None]) -> Iterator[tuple[int, Group]]:
        """Answers to calls by number, as they finish, until none is left; those that `poll` adds meanwhile join."""
        running: dict[int, LiveRequest] = {}
        scheduler = scheduler_of(self.sampler)
        while calls or scheduler.is_busy:
            while calls:
                _change(scheduler, running, calls.popleft())
            try:
                with decoding(self.sampler):
                    finished = scheduler.step()
            except (RuntimeError, MemoryError) as error:
                fewest = max((len(request.keys) for request in running.values()), default=1)
                if not is_out_of_memory(error) or scheduler.max_rows <= fewest:
                    raise
                scheduler = self._smaller(scheduler, running, fewest)
                continue
            for request, group in finished:
                number = next(number for number, other in running.items() if other is request)
                del running[number]
                yield number, group
            poll()
            self._between_tokens()

    def _smaller(self, scheduler: CallScheduler, running: Mapping[int, LiveRequest], fewest: int) -> CallScheduler:
        """Half as many rows at once, at least `fewest`, from the beginning: each completion has its own seed, so none of them changes."""
        sampler: Any = self.sampler
        sampler.max_rows = max(fewest, scheduler.max_rows // 2)
        release()
        smaller = scheduler_of(sampler)
        for request in running.values():
            smaller.add(request)
        return smaller

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


def _change(scheduler: CallScheduler, running: dict[int, LiveRequest], call: Call | Cancelled) -> None:
    """Add a call, or drop one that still runs."""
    if isinstance(call, Call):
        running[call.number] = call.request
        scheduler.add(call.request)
    elif (request := running.pop(call.number, None)) is not None:
        scheduler.cancel(request)


# -- the process ------------------------------------------------------------------------------------------------------


class Line(Protocol):
    """A line to the training process, such as a `multiprocessing.connection.Connection`."""

    def recv(self) -> Any:
        """The next message. Raises EOFError once there will be none."""

    def poll(self) -> bool: ...

    def send(self, message: tuple[Any, ...]) -> None: ...


class Served:
    """A `Writer` at the end of a line: ("message", pickled `ToWorker`) and ("weights", announced) in, messages of `Tell` out."""

    def __init__(
        self,
        line: Line,
        content: bytes,
        setup: Setup,
        version: int,
        weights: Callable[[Any], tuple[int, Mapping[str, Tensor]]],
    ) -> None:
        """`weights` gives version and weights of an announcement, not to change afterwards."""
        self.line, self.weights = line, weights
        self.orders: deque[Order] = deque()
        self.calls: deque[Call | Cancelled] = deque()
        self.replies: Replies | None = None
        self.announced: Any = None
        self.waits_for_orders = not (setup.in_flight if setup.has_calls else setup.takes_newest or not setup.has_turns)
        """True: new weights are taken with an order only: calls belong to the one before them, and a thread may send an order behind them."""
        self.writer = Writer(content, setup, version, self._newest, self._ask)
        line.send(("ready", time.monotonic()))

    def serve(self) -> None:
        """Serve orders and calls until the line is closed."""
        while True:
            while not self.orders and not self.calls:
                self._receive()
                if self.announced is not None and not self.orders and not self.waits_for_orders:
                    self.writer.take_newest()
            if self.orders:
                self._write(self.orders.popleft())
            for number, group in self.writer.answer(self.calls, self._poll):
                self.line.send(("answered", number, _sendable(group)))

    def _write(self, order: Order) -> None:
        while self.writer.version < order.at_least:
            if self.announced is None:
                self._receive()
            self.writer.take_newest()
        self.line.send(("began", order.number, time.monotonic()))
        for group in self.writer.write(order):
            self.line.send(("group", order.number, _sendable(group)))
        self.line.send(("done", order.number, time.monotonic()))

    def _ask(self, turns: Sequence[Turn]) -> Sequence[Reply]:
        """Replies of the training process's environment."""
        # its pixels are there already
        plain = [replace(turn, prompt=replace(turn.prompt, media=None)) for turn in turns]
        self.line.send(("turns", _sendable(plain)))
        while self.replies is None:
            self._receive()
        replies, self.replies = self.replies, None
        return replies.values

    def _receive(self) -> None:
        kind, content = self.line.recv()
        if kind == "weights":
            self.announced = content
            return
        match pickle.loads(content):  # trusted: from the process that started this one
            case Order() as order:
                self.orders.append(order)
            case Replies() as replies:
                self.replies = replies
            case call:
                self.calls.append(call)

    def _poll(self) -> None:
        while self.line.poll():
            self._receive()

    def _newest(self) -> tuple[int, Mapping[str, Tensor]] | None:
        if self.announced is None:
            self._poll()
        if self.announced is None:
            return None
        announced, self.announced = self.announced, None
        version, weights = self.weights(announced)
        self.line.send(("took", version, time.monotonic()))
        return version, weights


def _sendable(content: Group | list[Turn]) -> bytes:
    """The content pickled with the bytes of its tensors: torch would send file descriptors instead."""
    return pickle.dumps(content)


def main() -> None:
    """Serve the connection whose file descriptor is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the training process
    connection = Connection(int(sys.argv[1]))
    try:
        first = connection.recv()
        shared = views(first["weights"], first["shapes"])
        taken = lambda version: (version, {name: value.clone() for name, value in shared.items()})
        Served(connection, connection.recv_bytes(), first["setup"], first["version"], taken).serve()
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
