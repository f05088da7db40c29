"""Transports of weights to a vLLM server: a folder per version, the adapter alone, or NCCL."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from covey.errors import ConfigError, ServerError
from covey.rollout.vllm.pieces import Piece, changed_pieces
from covey.rollout.vllm.server import Server
from covey.rollout.vllm.weights import Source, safe_name, write_adapter, write_weights

Carrier = Literal["auto", "directory", "nccl"]
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
            self.server.reload_files([str(piece.file.absolute()) for piece in changed], num_bytes)
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
class NCCLTransport:
    """Full weights over NCCL by vLLM's own trainer client. Needs CUDA and vLLM here. Follows vLLM 0.32; not run on a GPU yet."""

    server: Server
    host: str
    port: int
    pauses: bool = True
    engine: Any = None

    def model_for(self, label: str) -> str:
        return self.server.facts.model

    def prepare(self, source: Source, label: str) -> Shipment:
        return Shipment(sum(weight.nbytes for _, weight in source.plain()))

    def send(self, source: Source, label: str, shipment: Shipment) -> int:
        deadlines = self.server.client.deadlines
        if self.engine is None:
            self.engine = within(lambda: self._start(source), deadlines.init, "setting up NCCL")
        self.engine.source = _PlainSource(source)
        seconds = deadlines.start + deadlines.update_of(shipment.num_bytes) + deadlines.finish
        try:
            within(self.engine.send_weights, seconds, "sending weights over NCCL")
        except ServerError:
            self.engine = None  # the process group cannot be reused after a partial broadcast
            raise
        return shipment.num_bytes

    def _start(self, source: Source) -> Any:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        reply = self.server.client.get("/get_world_size")
        info = NCCLTrainerInitInfo(
            rank=0, master_address=self.host, master_port=self.port, world_size=1 + int(reply["world_size"])
        )
        return WeightTransferTrainerFactory.trainer_init(
            info, client=_Lifecycle(self.server), source=_PlainSource(source)
        )

    def finish(self, shipment: Shipment, *, is_exact: bool) -> None:
        return None

    def forget(self, *, for_good: bool = False) -> None:
        return None


@dataclass(frozen=True, eq=False)
class _Lifecycle:
    """vLLM's `VLLMWeightSyncClient`: its lifecycle over HTTP, each call once and within its deadline."""

    server: Server

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info}, self.server.client.deadlines.init)

    def shutdown_weight_transfer_engine(self) -> None:
        self._post("/shutdown_weight_transfer_engine", None, self.server.client.deadlines.finish)

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", None, self.server.client.deadlines.start)

    def update_weights(self, update_info: Any) -> None:
        deadlines = self.server.client.deadlines
        sizes = zip(update_info["shapes"], update_info["dtype_names"], strict=True)
        num_bytes = sum(torch.Size(shape).numel() * getattr(torch, name).itemsize for shape, name in sizes)
        self._post("/update_weights", {"update_info": update_info}, deadlines.update_of(num_bytes))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        body = None if weight_version is None else {"weight_version": weight_version}
        self._post("/finish_weight_update", body, self.server.client.deadlines.finish)

    def _post(self, path: str, body: Any, seconds: float) -> None:
        self.server.client.post(path, body, seconds=seconds)


@dataclass(frozen=True, eq=False)
class _PlainSource:
    """vLLM's `WeightSource` over `Source.plain`: metadata and tensors in the same order."""

    source: Source

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self.source.plain()]

    def __iter__(self) -> Any:
        return self.source.plain()

    def held_names(self) -> None:
        return None


def within(work: Callable[[], Any], seconds: float, what: str) -> Any:
    """The result of `work`, done in a daemon thread. Raises ServerError past `seconds`, and any exception of `work`."""
    box: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            box.append(work())
        except Exception as error:  # noqa: BLE001 - handed to the caller
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True, name="covey-nccl")
    thread.start()
    thread.join(seconds)
    if failed:
        error = failed[0]
        raise error if isinstance(error, ServerError) else ServerError(f"{what} failed: {error}") from error
    if not box:
        raise ServerError(f"{what} was not done within {seconds:g} seconds.")
    return box[0]


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
    if carrier == "nccl":
        refuse_nccl(server, is_on_cuda)
    elif not server.client.has("/collective_rpc"):
        raise ConfigError(
            f"The server at {server.client.address} lacks /collective_rpc, through which it reads weights from a folder; start it "
            "in development mode, as covey serve-vllm does."
        )


def refuse_nccl(server: Server, is_on_cuda: bool) -> None:
    """Raise ConfigError if NCCL cannot carry the weights: a CPU server may report success without a transfer."""
    import importlib.util

    needed = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")
    reasons = {
        f"the server computes on {server.facts.device}": server.facts.device != "cuda",
        "the run's model is not on a CUDA device": not is_on_cuda,
        'the server was started without --weight-transfer-config \'{"backend": "nccl"}\'': server.facts.transfer_backend
        != "nccl",
        "the server lacks the endpoints of weight transfer": not server.client.has(*needed),
        "vLLM is not installed beside Covey": importlib.util.find_spec("vllm") is None,
    }
    reason = next((reason for reason, is_so in reasons.items() if is_so), None)
    if reason:
        raise ConfigError(f"vllm_transport='nccl' cannot be used: {reason}; use 'directory'.")


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
