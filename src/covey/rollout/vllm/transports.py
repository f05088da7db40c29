"""Transports of weights to a vLLM server through files: a folder per version, or the adapter alone; and what all transports have."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from covey.errors import ConfigError, ServerError
from covey.rollout.vllm.pieces import Piece, changed_pieces
from covey.rollout.vllm.server import SEES, Server
from covey.rollout.vllm.weights import Source, safe_name, sums_of, write_adapter, write_weights

Carrier = Literal["auto", "directory", "ipc", "gloo", "nccl"]
MOST_VERSIONS = 2
"""Number of versions whose folders are kept: the current and the previous one."""


@dataclass(frozen=True)
class Shipment:
    """Weights ready to be sent."""

    num_bytes: int
    """0: they are gathered while they are sent."""
    place: Path | None = None
    """Folder that the server reads; None: they travel from this process's memory."""
    pieces: Mapping[str, Piece] = field(default_factory=dict)
    """Whole weights in pieces; empty where they are sent at once."""
    sums: dict[str, int] = field(default_factory=dict)
    """Sums of the digest of whole weights, by block; of weights that are gathered while they are sent, after that."""

    @staticmethod
    def of(pieces: Mapping[str, Piece], place: Path | None = None) -> Shipment:
        """Whole weights in pieces."""
        return Shipment(sum(piece.num_bytes for piece in pieces.values()), place, pieces, sums_of(pieces.values()))

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
        place = self.folder / safe_name(label)
        before = self.pieces if self.sends_changed else {}
        has_digests = self.server.has_digests
        pieces = write_weights(source, place, dtype_of(self.server), has_digests=has_digests, before=before)
        self.written.append(place)
        self.pieces = pieces
        return Shipment.of(pieces, place)

    def send(self, source: Source, label: str, shipment: Shipment) -> int:
        held, self.held = self.held, {}
        changed = changed_pieces(shipment.pieces, held)
        num_bytes = sum(piece.num_bytes for piece in changed)
        if len(changed) == len(shipment.pieces):
            self.server.reload(shipment.folder, num_bytes)
        elif changed:
            files = [str(piece.file.absolute()) for piece in changed if piece.file is not None]
            self.server.reload_files(files, num_bytes)
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
        place = self.folder / safe_name(label)
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
    if carrier in ("ipc", "gloo", "nccl"):
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


def refuse_stale_head(server: Server, config: Any) -> None:
    """Raise ConfigError for a CPU server that keeps a stale packed `lm_head` after an update of tied embeddings."""
    is_tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
    if server.facts.device == "cpu" and is_tied and not server.facts.has_digest:
        raise ConfigError(
            f"The server at {server.client.address} computes on a CPU, where vLLM keeps a packed copy of lm_head that a reload "
            "does not renew when embeddings are tied, as this model's are; start it with covey serve-vllm, which renews it."
        )


def _remove_before(written: list[Path], shipment: Shipment) -> None:
    """Remove the folders before the one that was sent and its predecessor; later ones are still to be sent."""
    while len(written) > MOST_VERSIONS and shipment.place not in written[: MOST_VERSIONS - 1]:
        shutil.rmtree(written.pop(0), ignore_errors=True)
