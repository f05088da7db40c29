"""Choice of the transport by which a run's weights reach a vLLM server."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from covey.errors import ServerError
from covey.models import unwrapped
from covey.process.interruption import on_main
from covey.process.world import World
from covey.rollout.vllm.server import Server
from covey.rollout.vllm.transports import (
    AdapterTransport,
    Carrier,
    Transport,
    refuse_carrier,
    refuse_stale_head,
    whole_transport,
)
from covey.rollout.vllm.weights import why_not_alone

logger = logging.getLogger(__name__)


def transport_for(
    server: Server, model: Any, carrier: Carrier, folder: Path, port: int, *, world: World, is_split: bool
) -> Transport:
    """Transport: the adapter alone if only that is trained and the server takes it; else whole weights by `carrier`."""
    is_on_cuda = next(model.parameters()).is_cuda
    refuse_carrier(server, carrier, is_on_cuda=is_on_cuda)
    if hasattr(model, "peft_config") and carrier in ("auto", "directory"):
        reason = why_not_alone(model, server.facts.max_lora_rank, server.facts.data_parallel)
        if reason is None:
            return AdapterTransport(server, folder)
        logger.warning("Whole weights are sent to the vLLM server instead of the adapter alone: %s.", reason)
    refuse_stale_head(server, unwrapped(model).config)
    made: list[Transport] = []
    make = lambda: made.append(
        whole_transport(server, carrier, folder, port, is_on_cuda=is_on_cuda, tries=world.is_main and not is_split)
    )
    on_main(
        world,
        make,
        ServerError("no transport of weights to the vLLM server works on the main process; its log says why."),
    )
    if not world.is_main:
        make()
    return made[0]
