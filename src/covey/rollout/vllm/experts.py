"""Experts of each token as vLLM 0.32 returns them (`--enable-return-routed-experts`), for routing replay."""

import base64
import io
from collections.abc import Sequence
from dataclasses import replace

import numpy
import torch
from torch import nn

from covey.errors import ConfigError, ServerError
from covey.kernels import expert_layers
from covey.models import unwrapped
from covey.rollout.vllm.server import Server
from covey.types import Completion, Prompt

FLAG = "--enable-return-routed-experts"


def refuse_unrecorded(server: Server) -> None:
    """Raise ConfigError for a server that returns no experts."""
    if not server.facts.returns_experts:
        raise ConfigError(
            f"router_replay='R3' needs the experts of each token, which the server at {server.client.address} does not return; start it with "
            f"covey serve-vllm MODEL -- {FLAG}, or leave router_replay out."
        )


def recorded_layers(model: nn.Module, server: Server) -> tuple[int, ...]:
    """Numbers of the layers whose experts a server returns. Raises ConfigError as `refuse_unrecorded`."""
    refuse_unrecorded(server)
    return expert_layers(unwrapped(model))


def expect_recorder() -> None:
    """Raise ConfigError where the vLLM of this environment cannot return experts: an old one, or one without Triton."""
    from vllm import EngineArgs
    from vllm.triton_utils import HAS_TRITON

    if not (HAS_TRITON and hasattr(EngineArgs, "enable_return_routed_experts")):
        raise ConfigError(
            "router_replay='R3' needs the experts of each token, which vLLM (0.32) returns where it has Triton, and its build for CPUs has none; "
            "leave use_vllm out, so that Covey's own engine records them."
        )


def decoded(content: str | None) -> numpy.ndarray | None:
    """The array of a server's answer, which holds an .npy file in base64."""
    return None if content is None else numpy.load(io.BytesIO(base64.b64decode(content)), allow_pickle=False)


def with_experts(
    completions: Sequence[Completion], tables: Sequence[numpy.ndarray | None], prompt: Prompt, layers: Sequence[int]
) -> tuple[Completion, ...]:
    """Completions of a prompt with the experts of their tokens, which share the prompt's.

    `tables`: [P + T - 1, all layers, k] each, without the last token, which no pass has read; zeros in dense layers. `layers`: those with
    experts. Raises ServerError for a table of other tokens or layers.
    """
    start = len(prompt.token_ids) - 1
    made: list[Completion] = []
    for completion, table in zip(completions, tables, strict=True):
        ids = _of_layers(completion, table, prompt, layers)
        read = made[0].prompt_experts if made else ids[:start].clone()
        made.append(replace(completion, experts=ids[start:].clone(), prompt_experts=read))
    return tuple(made)


def _of_layers(
    completion: Completion, table: numpy.ndarray | None, prompt: Prompt, layers: Sequence[int]
) -> torch.Tensor:
    expected = len(prompt.token_ids) + completion.num_tokens - 1
    if table is None or len(table) != expected or table.shape[1] <= max(layers):
        shape = "none" if table is None else f"those of {len(table)} tokens and {table.shape[1]} layers"
        raise ServerError(
            f"router_replay='R3' needs the experts of {expected} tokens and layer {max(layers)} of a completion, and vLLM returned {shape}; "
            "take vLLM 0.32, or leave router_replay out."
        )
    ids = torch.from_numpy(table[:, list(layers)])
    if ids.shape[2] > 1 and bool((ids[..., 0] == ids[..., 1]).any()):
        raise ServerError(
            "router_replay='R3' needs the experts of each token, and vLLM returned one expert twice, as for a layer that it does not record; "
            "leave router_replay out."
        )
    return ids if ids.dtype == torch.uint8 else ids.to(torch.int16)
