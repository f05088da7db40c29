"""Transports of weights to a vLLM server: a folder per version, the adapter alone, or a broadcast by gloo or NCCL."""

from __future__ import annotations

import logging
import queue
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from covey.errors import ConfigError, ServerError, first_line
from covey.process.link.covey_link import Link, meeting, store_at
from covey.rollout.vllm.pieces import Piece, changed_pieces
from covey.rollout.vllm.server import JOIN, RECEIVE, SEES, TRY, Server
from covey.rollout.vllm.weights import Source, copy_weights, safe_name, write_adapter, write_weights

logger = logging.getLogger(__name__)

Carrier = Literal["auto", "directory", "gloo", "nccl"]
MOST_VERSIONS = 2
"""Number of versions whose folders are kept: the current and the previous one."""


@dataclass(frozen=True)
class Shipment:
    """Weights ready to be sent."""

    num_bytes: int
    place: Path | None = None
    """Folder that the server reads; None: they travel from this process's memory."""
    pieces: Mapping[str, Piece] = field(default_factory=dict)
    """Whole weights in pieces; empty where they are sent at once."""

    @property
    def folder(self) -> str:
        return str((self.place or Path()).absolute())


class Transport(Protocol):
    """Transport of a weight version to a server."""

    pauses: bool
    """True if the server must be paused during `send`, because its weights are replaced in place."""

    def model_for(self, label: str) -> str:
        """Model name for requests once `label` is served."""
        ...

    def prepare(self, source: Source, label: str) -> Shipment:
        """Prepare a transfer while the server still generates. Of a split model all processes take part."""
        ...

    def send(self, source: Source, label: str, shipment: Shipment) -> int:
        """Send the weights of `prepare`; the bytes. After a ServerError the server's weights are undefined.

        After `finish` only what has changed since is sent; if the update that follows fails, the next call sends everything.
        """
        ...

    def finish(self, shipment: Shipment, *, is_exact: bool) -> None:
        """Remove files and adapters that no request uses any more. `is_exact`: digests proved that the server has these weights."""
        ...

    def forget(self, *, for_good: bool = False) -> None:
        """Send everything next time, as the server may have lost what it had, or (`for_good`) every time."""
        ...


@dataclass(eq=False)
class DirectoryTransport:
    """Weights in a new folder that the server reads: for any device, on a shared file system.

    Every folder holds all weights. The server reads the pieces that changed where digests prove the others afterwards.
    """

    server: Server
    folder: Path
    pauses: bool = True
    sends_changed: bool = False
    """True: unchanged pieces are linked instead of written, and not read again."""
    written: list[Path] = field(default_factory=list)
    pieces: Mapping[str, Piece] = field(default_factory=dict)
    """Those that were written last."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Numbers of the pieces that the server has; empty where that is not known."""

    def model_for(self, label: str) -> str:
        return self.server.facts.model

    def attempt(self) -> None:
        """Let the server look for one small file. Raises ServerError where it does not see it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "trial"
        file.write_text("Does the server see this folder?")
        try:
            seen = self.server.call_workers(SEES, seconds=self.server.client.deadlines.init, path=str(file.absolute()))
        finally:
            file.unlink()
        if not seen or not all(seen):
            raise ServerError(f"the server does not see {self.folder.absolute()}.")

    def prepare(self, source: Source, label: str) -> Shipment:
        place = _new_place(self.folder, label)
        before = self.pieces if self.sends_changed else {}
        has_digests = self.server.has_digests
        pieces = write_weights(source, place, dtype_of(self.server), has_digests=has_digests, before=before)
        self.written.append(place)
        self.pieces = pieces
        return Shipment(sum(piece.num_bytes for piece in pieces.values()), place, pieces)

    def send(self, source: Source, label: str, shipment: Shipment) -> int:
        held, self.held = self.held, {}
        changed = changed_pieces(shipment.pieces, held)
        num_bytes = sum(piece.num_bytes for piece in changed)
        if len(changed) == len(shipment.pieces):
            self.server.reload(shipment.folder, num_bytes)
        elif changed:
            files = [str(piece.file.absolute()) for piece in changed if piece.file is not None]
            self.server.reload_files(files, num_bytes)
        self.server.repack()
        return num_bytes

    def finish(self, shipment: Shipment, *, is_exact: bool) -> None:
        if self.sends_changed and is_exact:
            self.held = {key: piece.number for key, piece in shipment.pieces.items()}
        _remove_before(self.written, shipment)

    def forget(self, *, for_good: bool = False) -> None:
        self.held, self.sends_changed = {}, self.sends_changed and not for_good


@dataclass(eq=False)
class AdapterTransport:
    """The adapter alone, in a new folder and under a new name; base weights and running requests are not affected."""

    server: Server
    folder: Path
    pauses: bool = False
    written: list[Path] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def model_for(self, label: str) -> str:
        return label

    def prepare(self, source: Source, label: str) -> Shipment:
        place = _new_place(self.folder, label)
        size = write_adapter(source, place)
        self.written.append(place)
        return Shipment(size, place)

    def send(self, source: Source, label: str, shipment: Shipment) -> int:
        self.server.load_adapter(label, shipment.folder)
        self.names.append(label)
        return shipment.num_bytes

    def forget(self, *, for_good: bool = False) -> None:
        return None

    def finish(self, shipment: Shipment, *, is_exact: bool) -> None:
        """Unload old adapters; one earlier adapter stays for requests that still run."""
        while len(self.names) > max(1, min(MOST_VERSIONS, self.server.facts.max_loras)):
            oldest = self.names.pop(0)
            if oldest in self.server.models():  # a restarted server has lost it
                self.server.unload_adapter(oldest)
        _remove_before(self.written, shipment)


@dataclass(eq=False)
class BroadcastTransport:
    """Weights over a process group with the server's workers: gloo between any devices, NCCL between CUDA devices. Needs the extension.

    The main process has a copy in host memory, in the server's type, with which later weights are compared. NCCL was not run on a GPU yet.
    """

    server: Server
    backend: str
    port: int
    pauses: bool = True
    sends_changed: bool = False
    pieces: Mapping[str, Piece] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    """Numbers of the pieces that the server has; empty where that is not known."""
    link: Link | None = None
    store: Any = None
    meetings: int = 0

    def model_for(self, label: str) -> str:
        return self.server.facts.model

    def prepare(self, source: Source, label: str) -> Shipment:
        before = self.pieces if self.sends_changed else {}
        dtype = dtype_of(self.server)
        self.pieces = copy_weights(source, dtype, has_digests=self.server.has_digests, before=before)
        return Shipment(sum(piece.num_bytes for piece in self.pieces.values()), pieces=self.pieces)

    def send(self, source: Source, label: str, shipment: Shipment) -> int:
        held, self.held = self.held, {}
        changed = changed_pieces(shipment.pieces, held)
        num_bytes = sum(piece.num_bytes for piece in changed)
        if changed:
            seconds = self.server.client.deadlines.update_of(num_bytes)
            self._broadcast([piece.tensors or {} for piece in changed], RECEIVE, seconds)
        self.server.repack()
        return num_bytes

    def attempt(self) -> None:
        """Send one small tensor and compare what arrived. Raises ServerError where that fails, within the deadline `init`."""
        values = [1.0, 2.0, 3.0]
        answers = self._broadcast([{"trial": torch.tensor(values)}], TRY, self.server.client.deadlines.init)
        if answers != [[values]] * self.server.facts.tensor_parallel:
            raise ServerError(f"a broadcast by {self.backend} arrived changed.")

    def _broadcast(self, messages: Sequence[Mapping[str, Tensor]], method: str, seconds: float) -> list[Any]:
        """Results of the workers' `method`, which receives these messages. After an error the next call meets them again."""
        link, self.link = self.link or self._meet(), None
        call = lambda: self.server.call_workers(method, seconds=seconds)
        _, answers = together([lambda: link.send(messages), call], seconds, f"sending weights by {self.backend}")
        self.link = link
        return list(answers)

    def _meet(self) -> Any:
        seconds, size = self.server.client.deadlines.init, 1 + self.server.facts.tensor_parallel
        device = f"cuda:{torch.cuda.current_device()}" if self.backend == "nccl" else "cpu"
        try:
            self.store = self.store or store_at("0.0.0.0", self.port, size=size, seconds=seconds, is_master=True)
        except RuntimeError as error:
            raise ServerError(
                f"port {self.port}, at which the server's workers meet this process, cannot be used ({first_line(error)}); give "
                "another vllm_group_port."
            ) from error
        self.meetings += 1
        store = meeting(self.store, self.meetings)
        join = lambda: Link(self.backend, store, rank=0, size=size, seconds=seconds, device=device)
        where = {"host": local_address(self.server), "port": self.port, "number": self.meetings, "size": size}
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
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address.host, address.port))  # sends nothing
        return str(probe.getsockname()[0])


def together(works: Sequence[Callable[[], Any]], seconds: float, what: str) -> list[Any]:
    """Results of `works`, each in a daemon thread. Raises ServerError at the first failure, and past `seconds`."""
    results: queue.Queue[tuple[int, Any, Exception | None]] = queue.Queue()

    def run(place: int, work: Callable[[], Any]) -> None:
        try:
            results.put((place, work(), None))
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits
            results.put((place, None, error))

    for place, work in enumerate(works):
        threading.Thread(target=run, args=(place, work), daemon=True, name="covey-broadcast").start()
    until, done = time.monotonic() + seconds, dict[int, Any]()
    while len(done) < len(works):
        try:
            place, result, error = results.get(timeout=max(0.01, until - time.monotonic()))
        except queue.Empty:
            raise ServerError(f"{what} was not done within {seconds:g} seconds.") from None
        if error is not None:
            raise ServerError(f"{what} failed: {first_line(error)}") from error
        done[place] = result
    return [done[place] for place in range(len(works))]


def dtype_of(server: Server) -> torch.dtype:
    """Compute dtype of a server."""
    dtype = getattr(torch, server.facts.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"The server at {server.client.address} computes in {server.facts.dtype!r}, which is no type of weights."
        )
    return dtype


def refuse_carrier(server: Server, carrier: Carrier, *, is_on_cuda: bool) -> None:
    """Raise ConfigError if weights of a run on such a device cannot travel to the server by `carrier`."""
    if carrier in ("gloo", "nccl"):
        if reason := why_not_broadcast(server, carrier, is_on_cuda=is_on_cuda):
            raise ConfigError(f"vllm_transport={carrier!r} cannot be used: {reason}; use 'directory'.")
    elif not server.client.has("/collective_rpc"):
        raise ConfigError(
            f"The server at {server.client.address} lacks /collective_rpc, through which it reads weights from a folder; start it "
            "in development mode, as covey serve-vllm does."
        )


def why_not_broadcast(server: Server, backend: str, *, is_on_cuda: bool) -> str | None:
    """Reason why weights cannot travel by this backend; None if a trial may show that they can."""
    facts = server.facts
    reasons = {
        f"the server computes on {facts.device}": backend == "nccl" and facts.device != "cuda",
        "the run's model is not on a CUDA device": backend == "nccl" and not is_on_cuda,
        f"the server has {facts.data_parallel} replicas": facts.data_parallel > 1,
        "the server was not started by covey serve-vllm": not facts.has_digest,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def whole_transport(
    server: Server, carrier: Carrier, folder: Path, port: int, *, is_on_cuda: bool, tries: bool
) -> DirectoryTransport | BroadcastTransport:
    """The first transport of whole weights that a trial shows to work: a folder that both see, or gloo. NCCL must be asked for.

    `tries` False: the process that only takes part in gathering. Raises ServerError where a transport that was asked for fails.
    """
    by_folder = DirectoryTransport(server, folder)
    if not tries or carrier == "directory" or (carrier == "auto" and not server.facts.has_digest):
        return by_folder
    if carrier != "auto":
        chosen = BroadcastTransport(server, carrier, port)
        chosen.attempt()
        return chosen
    try:
        by_folder.attempt()
        logger.info("Weights travel to the vLLM server by a folder that it sees.")
        return by_folder
    except ServerError as error:
        unseen = str(error).rstrip(".")
    reason = why_not_broadcast(server, "gloo", is_on_cuda=is_on_cuda)
    broadcast = BroadcastTransport(server, "gloo", port)
    try:
        if reason is None:
            broadcast.attempt()
            logger.warning("Weights travel to the vLLM server by gloo (not by a folder: %s).", unseen)
            return broadcast
    except ServerError as error:
        reason = str(error).rstrip(".")
    raise ServerError(
        f"Weights cannot travel to the vLLM server: not by a folder ({unseen}), and not by gloo ({reason}). Give a vllm_directory that "
        "both see, or a vllm_group_port that the server reaches."
    )


def refuse_stale_head(server: Server, config: Any) -> None:
    """Raise ConfigError for a CPU server that keeps a stale packed `lm_head` after an update of tied embeddings."""
    is_tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
    if server.facts.device == "cpu" and is_tied and not server.facts.has_digest:
        raise ConfigError(
            f"The server at {server.client.address} computes on a CPU, where vLLM keeps a packed copy of lm_head that a reload "
            "does not renew when embeddings are tied, as this model's are; start it with covey serve-vllm, which renews it."
        )


def _new_place(folder: Path, label: str) -> Path:
    return folder / safe_name(label)


def _remove_before(written: list[Path], shipment: Shipment) -> None:
    """Remove the folders before the one that was sent and its predecessor; later ones are still to be sent."""
    while len(written) > MOST_VERSIONS and shipment.place not in written[: MOST_VERSIONS - 1]:
        shutil.rmtree(written.pop(0), ignore_errors=True)
