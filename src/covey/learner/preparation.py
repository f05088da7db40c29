"""Preparation of a model for training: training mode and gradient checkpointing."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from covey.errors import RAW_ERRORS, first_line
from covey.kernels import HalfWeights, add_adapters_inside_products, fuse, training_heap, triton_unavailable_reason
from covey.learner.policy import Policy
from covey.models import decoder_of, unwrapped
from covey.process.memory import is_out_of_memory

logger = logging.getLogger(__name__)


def prepare_for_training(model: torch.nn.Module, args: Any) -> Any:
    """Set gradient checkpointing as configured, and training mode."""
    inner = unwrapped(model)
    add_adapters_inside_products(model)
    word = "activation" if hasattr(inner, "activation_checkpointing_enable") else "gradient"  # renamed in 5.23
    if args.checkpoints_activations:
        checkpoint_activations(model, args.gradient_checkpointing_kwargs)
        return model.train()
    if next(inner.parameters()).device.type == "cpu":
        training_heap(returns_blocks=inner is not model)
    if getattr(inner, f"is_{word}_checkpointing", False):
        getattr(inner, f"{word}_checkpointing_disable")()
    return model.train()


def checkpoint_activations(model: torch.nn.Module, kwargs: Mapping[str, Any] | None = None) -> None:
    """Enable activation checkpointing: each block saves its input only and recomputes the rest in the backward pass."""
    inner = unwrapped(model)
    word = "activation" if hasattr(inner, "activation_checkpointing_enable") else "gradient"
    options = {"use_reentrant": False, **(kwargs or {})}
    if next(inner.parameters()).device.type == "cpu":
        training_heap(returns_blocks=True)
    getattr(inner, f"{word}_checkpointing_enable")(**{f"{word}_checkpointing_kwargs": options})
    if inner is not model:
        inner.enable_input_require_grads()  # frozen embeddings would cut the graph at the first block


def on_accelerator(policy: Policy, *, is_split: bool) -> Policy:
    """The policy prepared for a GPU: elementwise work of its layers fused in place, and its weights cast once a step.

    `is_split`: FSDP will split the model, which casts by itself. A policy on another device is returned as it is.
    """
    if policy.device.type != "cuda":
        return policy
    weight_dtype = next(policy.model.parameters()).dtype
    dtype = policy.compute_dtype or weight_dtype
    if dtype == torch.float32:
        return policy  # nothing to cast, and products take most of the time
    reason = triton_unavailable_reason(policy.device)
    if reason is None:
        try:
            fuse(policy.model, run=partial(short_pass, policy))
        except RAW_ERRORS as error:
            if is_out_of_memory(error):
                raise
            reason = f"a pass of eight tokens fails ({first_line(error)})"
    if reason is not None:
        logger.warning("Norms, rotations and gated MLPs take several kernels each: %s.", reason)
    if policy.compute_dtype is None or is_split:
        return policy
    head = policy.output_layer()  # computes by blocks, from the weight itself
    return replace(policy, half=HalfWeights(policy.model, dtype, (head,)))


@torch.no_grad()
def short_pass(policy: Policy) -> torch.Tensor:
    """[1, 8, D] hidden states of eight tokens, computed as in a pass of the learner; no random number is used up."""
    device = policy.device
    embedding = unwrapped(policy.model).get_input_embeddings()
    ids = torch.arange(8, device=device)[None] % len(embedding.weight)
    with policy.autocast(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        hidden: torch.Tensor = decoder_of(policy.model)(input_ids=ids, use_cache=False).last_hidden_state
    return hidden
