"""Choice of the transport by which a run's weights reach a vLLM server."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from covey.errors import ServerError
from covey.models import short_name, unwrapped
from covey.process.interruption import on_main
from covey.process.sharding import Shards, compute_device
from covey.process.world import World
from covey.rollout.sampler import SamplingParams
from covey.rollout.vllm.broadcast import BroadcastTransport
from covey.rollout.vllm.experts import refuse_unrecorded
from covey.rollout.vllm.pieces import largest_piece
from covey.rollout.vllm.plain_layers import refuse_unmerged
from covey.rollout.vllm.server import (
    Server,
    refuse_other_model,
    refuse_packed,
    refuse_raw_logprobs,
    refuse_smaller_vocabulary,
)
from covey.rollout.vllm.transports import (
    AdapterTransport,
    Carrier,
    DirectoryTransport,
    Transport,
    dtype_of,
    refuse_carrier,
    refuse_stale_head,
    why_not_broadcast,
)
from covey.rollout.vllm.weights import base_sums, differing_blocks, texts_of, why_not_alone

logger = logging.getLogger(__name__)


def transport_for(
    server: Server, model: Any, carrier: Carrier, folder: Path, port: int, *, world: World, shards: Shards | None = None
) -> Transport:
    """Transport: the adapter alone if only that is trained and the server takes it; else whole weights by `carrier`."""
    is_on_cuda = compute_device(next(model.parameters())).type == "cuda"
    refuse_carrier(server, carrier, is_on_cuda=is_on_cuda)
    refuse_smaller_vocabulary(server, unwrapped(model).config)
    if hasattr(model, "peft_config") and carrier in ("auto", "directory"):
        reason = why_not_alone(model, server.facts.max_lora_rank, server.facts.data_parallel)
        reason = reason or _why_not_on_base(server, model, shards, world)
        if reason is None:
            logger.info("The adapter alone travels to the vLLM server, through a folder that it sees.")
            return AdapterTransport(server, folder)
        logger.warning("Whole weights are sent to the vLLM server instead of the adapter alone: %s.", reason)
    refuse_packed(server)
    refuse_unmerged(model)
    refuse_stale_head(server, unwrapped(model).config)
    failed = ServerError("no transport of weights to the vLLM server works on the main process; its log says why.")
    room = largest_piece(model.named_parameters()) * dtype_of(server).itemsize
    choose = lambda: whole_transport(server, carrier, folder, port, is_on_cuda=is_on_cuda, room=room)
    chosen = on_main(world, choose, failed)
    backend = world.broadcast(getattr(chosen, "backend", None))
    if chosen is None:  # this process only takes part in gathering
        return DirectoryTransport(server, folder) if backend is None else BroadcastTransport(server, backend, port)
    return chosen


def _why_not_on_base(server: Server, model: Any, shards: Shards | None, world: World) -> str | None:
    """Reason why the adapter cannot stand on the weights that the server has, by their digest or, without one, by what it says. Collective."""
    is_quantized = getattr(unwrapped(model), "is_quantized", False) or server.is_packed
    if is_quantized:  # one of both has the weights before that
        return None
    if not server.has_digests:
        failed = ServerError("the vLLM server was not asked for its model on the main process; its log says why.")
        return world.broadcast(on_main(world, lambda: _why_another_base(server, model), failed))
    sums = base_sums(model, shards, dtype_of(server))

    def wrong() -> list[str]:
        try:
            return differing_blocks(texts_of(sums), (server.digests() or [{}])[0])
        except ValueError:  # blocks of other names
            return []

    failed = ServerError("the weights of the vLLM server were not read on the main process; its log says why.")
    blocks = world.broadcast(on_main(world, wrong, failed))
    return f"its base weights are not this run's, such as those of {blocks[0]}" if blocks else None


def _why_another_base(server: Server, model: Any) -> str | None:
    """Reason to believe that a server without comparable digests has another base: an earlier run's whole weights, or another model's name."""
    label, name, mine = server.version(), Path(server.facts.folder).name, short_name(unwrapped(model))
    if label not in ("default", *server.models()):  # that of an adapter is its name
        return f"it has the whole weights of {label}, which cannot be compared with this run's base"
    is_other = bool(getattr(unwrapped(model).config, "_name_or_path", "")) and name != mine
    return f"it was started with {name}, which cannot be compared with this run's {mine}" if is_other else None


def whole_transport(
    server: Server, carrier: Carrier, folder: Path, port: int, *, is_on_cuda: bool, room: int = 0
) -> DirectoryTransport | BroadcastTransport:
    """The first transport of whole weights that a trial shows to work: memory within a machine, a folder, gloo. NCCL must be asked for.

    `room`: bytes of the largest piece. Raises ServerError where none works, or not the one that was asked for.
    """
    by_folder = DirectoryTransport(server, folder)
    if carrier == "directory" or (carrier == "auto" and not server.facts.has_digest):
        return by_folder
    failures: list[tuple[str, str]] = []
    for backend, device in _ways(server, carrier, is_on_cuda=is_on_cuda):
        is_folder, name = backend == "directory", _NAMES.get((backend, device), backend)
        way = by_folder if is_folder else BroadcastTransport(server, backend, port, device, room)
        try:
            if not is_folder and (reason := why_not_broadcast(server, backend, is_on_cuda=is_on_cuda)):
                raise ServerError(reason)
            way.attempt()
        except ServerError as error:
            failures.append((name, str(error).rstrip(".")))
            continue
        before = "; ".join(f"not by {other}: {reason}" for other, reason in failures)
        level, seen = logging.WARNING if before else logging.INFO, " that it sees" * is_folder
        logger.log(level, "Weights travel to the vLLM server by %s%s%s.", name, seen, f" ({before})" if before else "")
        return way
    reasons = ", and ".join(f"not by {name} ({reason})" for name, reason in failures)
    advice = "a vllm_directory that both see, or a vllm_group_port that the server reaches"
    advice = "another vllm_transport" if carrier == "ipc" else advice
    raise ServerError(f"Weights cannot travel to the vLLM server: {reasons}. Give {advice}.")


_NAMES = {("ipc", "cpu"): "shared memory", ("ipc", "cuda"): "CUDA IPC", ("directory", "cpu"): "a folder"}


def _ways(server: Server, carrier: Carrier, *, is_on_cuda: bool) -> Iterator[tuple[str, str]]:
    """Backends to try, in this order, and the device that each sends from."""
    is_near = server.client.address.is_local
    if (carrier == "ipc" or (carrier == "auto" and is_near)) and is_on_cuda and server.facts.device == "cuda":
        yield "ipc", "cuda"
    if carrier == "auto":
        yield from [("ipc", "cpu")] * is_near
        yield from (("directory", "cpu"), ("gloo", "cpu"))
    else:
        yield carrier, "cuda" if carrier == "nccl" else "cpu"


def refuse_unfit(
    server: Server,
    config: Any,
    tokenizer: Any,
    params: SamplingParams,
    transport: Carrier,
    *,
    is_on_cuda: bool,
    has_adapter: bool,
    records_experts: bool = False,
) -> None:
    """Raise the ConfigError that a ServerSampler would raise, by the model's configuration: before its weights are loaded."""
    if records_experts:
        refuse_unrecorded(server)
    refuse_carrier(server, transport, is_on_cuda=is_on_cuda)
    refuse_raw_logprobs(server, params)
    refuse_other_model(server, config, tokenizer, params.stop)
    if not has_adapter:  # an adapter may travel alone
        refuse_packed(server)
        refuse_stale_head(server, config)
