"""Choice of the transport by which a run's weights reach a vLLM server."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from covey.errors import ServerError
from covey.models import unwrapped
from covey.process.interruption import on_main
from covey.process.sharding import compute_device
from covey.process.world import World
from covey.rollout.vllm.broadcast import BroadcastTransport
from covey.rollout.vllm.server import Server
from covey.rollout.vllm.transports import (
    AdapterTransport,
    Carrier,
    DirectoryTransport,
    Transport,
    refuse_carrier,
    refuse_stale_head,
    why_not_broadcast,
)
from covey.rollout.vllm.weights import why_not_alone

logger = logging.getLogger(__name__)


def transport_for(server: Server, model: Any, carrier: Carrier, folder: Path, port: int, *, world: World) -> Transport:
    """Transport: the adapter alone if only that is trained and the server takes it; else whole weights by `carrier`."""
    is_on_cuda = compute_device(next(model.parameters())).type == "cuda"
    refuse_carrier(server, carrier, is_on_cuda=is_on_cuda)
    if hasattr(model, "peft_config") and carrier in ("auto", "directory"):
        reason = why_not_alone(model, server.facts.max_lora_rank, server.facts.data_parallel)
        if reason is None:
            return AdapterTransport(server, folder)
        logger.warning("Whole weights are sent to the vLLM server instead of the adapter alone: %s.", reason)
    refuse_stale_head(server, unwrapped(model).config)
    failed = ServerError("no transport of weights to the vLLM server works on the main process; its log says why.")
    chosen = on_main(world, lambda: whole_transport(server, carrier, folder, port, is_on_cuda=is_on_cuda), failed)
    backend = world.broadcast(getattr(chosen, "backend", None))
    if chosen is None:  # this process only takes part in gathering
        return DirectoryTransport(server, folder) if backend is None else BroadcastTransport(server, backend, port)
    return chosen


def whole_transport(
    server: Server, carrier: Carrier, folder: Path, port: int, *, is_on_cuda: bool
) -> DirectoryTransport | BroadcastTransport:
    """The first transport of whole weights that a trial shows to work: a folder that both see, or gloo. NCCL must be asked for.

    Raises ServerError where a transport that was asked for fails.
    """
    by_folder = DirectoryTransport(server, folder)
    if carrier == "directory" or (carrier == "auto" and not server.facts.has_digest):
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
