"""Weights to the workers of a vLLM server: a broadcast by gloo or NCCL, or memory of one machine that is handed over."""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from covey.errors import ServerError, first_line
from covey.process.link.covey_link import Link, meeting, store_at
from covey.rollout.vllm.pieces import Piece, add_digest, changed_pieces, in_pieces
from covey.rollout.vllm.server import JOIN, RECEIVE, TRY, Server
from covey.rollout.vllm.transports import Shipment, dtype_of
from covey.rollout.vllm.weights import Source, copy_weights

_LOOK_SECONDS = 0.05
"""Polling interval of an end while a thread is fed."""
_ANSWER_SECONDS = 1.0
"""Time that the server has to say why a connection was closed."""


@dataclass(eq=False)
class BroadcastTransport:
    """Weights over a process group with the server's workers: gloo between any devices, NCCL between CUDA devices. Needs the extension.

    By `ipc` they are handed over within a machine, a piece at a time: as memory of the GPU (CUDA IPC), or as shared memory of the host.
    The main process has a copy in host memory, in the server's type, with which later weights are compared. There is none of a model that
    is split, nor where weights that stay are sent from a GPU: a piece is sent once it is gathered. NCCL was not run on a GPU yet.
    """

    server: Server
    backend: str
    port: int
    device: str = "cpu"
    """Type of the device that it sends from: `cuda` for NCCL and CUDA IPC."""
    room: int = 0
    """Bytes of the largest piece, which a trial of `ipc` hands over too: shared memory may be too small for it."""
    pauses: bool = True
    sends_changed: bool = False
    pieces: Mapping[str, Piece] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    """Numbers of the pieces that the server has; empty where that is not known."""
    link: Link | None = None
    store: Any = None
    meetings: int = 0
    name: str = ""
    """Of the link, which another process that joins the server replaces."""

    def model_for(self, label: str) -> str:
        return self.server.facts.model

    def prepare(self, source: Source, label: str) -> Shipment:
        if source.summon is not None:
            return Shipment(0)
        before = self.pieces if self.sends_changed else {}
        dtype = dtype_of(self.server)
        self.pieces = copy_weights(source, dtype, has_digests=self.server.has_digests, before=before)
        return Shipment.of(self.pieces)

    def send(self, source: Source, label: str, shipment: Shipment) -> int:
        held, self.held = self.held, {}
        if source.summon is not None:
            return self._gathered(source, shipment.sums)
        changed = changed_pieces(shipment.pieces, held)
        num_bytes = sum(piece.num_bytes for piece in changed)
        if changed:
            seconds = self.server.client.deadlines.update_of(num_bytes)
            self._broadcast([piece.tensors or {} for piece in changed], RECEIVE, seconds)
        return num_bytes

    def _gathered(self, source: Source, sums: dict[str, int]) -> int:
        """Send weights that stay as they are meanwhile, each piece once it is gathered; the bytes. `sums` become those of the digest."""
        sums.clear()
        num_bytes = 0
        assert source.summon is not None
        source.summon()
        weights = source.distinct(dtype_of(self.server))

        def pieces() -> Iterator[Mapping[str, Tensor]]:
            nonlocal num_bytes
            for _, tensors in in_pieces(weights, on_host=self.device == "cpu"):
                for name, weight in tensors.items() if self.server.has_digests else ():
                    add_digest(sums, name, weight)
                num_bytes += sum(weight.nbytes for weight in tensors.values())
                yield tensors

        try:
            seconds = self.server.client.deadlines.update_of(source.num_bytes(dtype_of(self.server)))
            self._broadcast(pieces(), RECEIVE, seconds)
        finally:
            if source.shards is not None:
                deque(weights, maxlen=0)  # the other processes gather to the end, whatever became of the server
        return num_bytes

    def attempt(self) -> None:
        """Send one small tensor and compare what arrived. Raises ServerError where that fails, within the deadline `init`."""
        values = [1.0, 2.0, 3.0]
        messages = [{"trial": torch.tensor(values)}]
        if self.backend == "ipc" and self.room:
            messages.append({"room": torch.zeros(self.room, dtype=torch.uint8)})
        answers = self._broadcast(messages, TRY, self.server.client.deadlines.init)
        if answers != [[values]] * self.server.facts.tensor_parallel:
            raise ServerError(f"a broadcast by {self.backend} arrived changed.")

    def _broadcast(self, messages: Iterable[Mapping[str, Tensor]], method: str, seconds: float) -> list[Any]:
        """Results of the workers' `method`, which receives these messages, made in this thread while others are sent.

        After an error the next call meets the workers again.
        """
        link, self.link = self.link or self._meet(), None
        call = lambda: self.server.call_workers(method, seconds=seconds, name=self.name)
        feed = Feed(messages)
        works = [lambda: link.send(feed.read()), call]
        with link.failing():
            _, answers = together(works, seconds, f"sending weights by {self.backend}", feed)
        self.link = link
        return list(answers)

    def _meet(self) -> Any:
        seconds, size = self.server.client.deadlines.init, 1 + self.server.facts.tensor_parallel
        device = f"cuda:{torch.cuda.current_device()}" if self.device == "cuda" else "cpu"
        host, port = local_address(self.server), 0 if self.backend == "ipc" else self.port
        try:
            self.store = self.store or store_at(host, port, size=size, seconds=seconds, is_master=True)
            # a client for each meeting: one that fails blocks it
            there = store_at(host, self.store.port, size=size, seconds=seconds)
        except (RuntimeError, OSError) as error:
            place, advice = (f"port {port}", "; give another vllm_group_port") if port else ("a free port", "")
            raise ServerError(
                f"{place} of {host}, at which the server's workers meet this process, cannot be used ({first_line(error)}){advice}."
            ) from error
        self.meetings += 1
        port, store = self.store.port, meeting(there, self.meetings)
        join = lambda: Link(self.backend, store, rank=0, size=size, seconds=seconds, device=device)
        self.name = secrets.token_hex(8)
        where = {"host": host, "port": port, "number": self.meetings, "size": size, "name": self.name}
        call = lambda: self.server.call_workers(JOIN, seconds=seconds, backend=self.backend, limit=seconds, **where)
        link, _ = together([join, call], seconds, f"meeting the server's workers by {self.backend}")
        return link

    def finish(self, shipment: Shipment, *, is_exact: bool) -> None:
        if self.sends_changed and is_exact:
            self.held = {key: piece.number for key, piece in shipment.pieces.items()}

    def forget(self, *, for_good: bool = False) -> None:
        """Also meet the workers again: those of a server that was started again are others."""
        self.held, self.link, self.sends_changed = {}, None, self.sends_changed and not for_good


def local_address(server: Server) -> str:
    """Address of this machine as the server's machine reaches it."""
    address = server.client.address
    if address.is_local:
        return "::1" if address.host == "::1" else "127.0.0.1"
    for family, kind, _, _, place in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:  # no route in this family
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    raise ServerError(f"{address.host} has no address that this machine has a route to; give one that it reaches.")


class Feed:
    """Items made in this thread and read in another, one in advance, until it is over."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self.items, self.ready = items, queue.Queue[Any](1)
        self.is_over = threading.Event()

    def read(self) -> Iterator[Any]:
        """The items, in the other thread. Raises RuntimeError if it is over before the last."""
        while not self.is_over.is_set():
            with contextlib.suppress(queue.Empty):
                if (item := self.ready.get(timeout=_LOOK_SECONDS)) is None:
                    return
                yield item
        raise RuntimeError("the rest is not sent, because the update has failed")

    def fill(self, until: float) -> None:
        """Make the items, until that time of the monotonic clock at the latest."""
        for item in chain(self.items, [None]):
            while not self.is_over.is_set() and time.monotonic() < until:
                with contextlib.suppress(queue.Full):
                    self.ready.put(item, timeout=_LOOK_SECONDS)
                    break
            else:
                return


def together(works: Sequence[Callable[[], Any]], seconds: float, what: str, feed: Feed | None = None) -> list[Any]:
    """Results of `works`, each in a daemon thread. Raises ServerError at the first failure, and past `seconds`.

    `feed`: filled in this thread, until one of them has ended.
    """
    feed = feed or Feed()
    results: queue.Queue[tuple[int, Any, Exception | None]] = queue.Queue()

    def run(place: int, work: Callable[[], Any]) -> None:
        try:
            results.put((place, work(), None))
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits
            results.put((place, None, error))
        feed.is_over.set()

    for place, work in enumerate(works):
        threading.Thread(target=run, args=(place, work), daemon=True, name="covey-broadcast").start()
    until, done = time.monotonic() + seconds, dict[int, Any]()
    try:
        feed.fill(until)
        while len(done) < len(works):
            try:
                place, result, error = results.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                raise ServerError(f"{what} was not done within {seconds:g} seconds.") from None
            if error is not None:
                error = _clearer(error, results)
                raise ServerError(f"{what} failed: {first_line(error)}") from error
            done[place] = result
        return [done[place] for place in range(len(works))]
    finally:
        feed.is_over.set()


def _clearer(error: Exception, results: queue.Queue[tuple[int, Any, Exception | None]]) -> Exception:
    """This error, or that of another work which ends soon: of a connection that was closed the server's answer says why."""
    if isinstance(error, ServerError):
        return error
    with contextlib.suppress(queue.Empty):
        *_, other = results.get(timeout=_ANSWER_SECONDS)
        return other if isinstance(other, ServerError) else error
    return error
