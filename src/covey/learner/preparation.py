"""Preparation of a model for training: training mode and gradient checkpointing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.kernels import Recomputing, training_heap
from covey.models import unwrapped


def prepare_for_training(model: Any, args: Any) -> Any:
    """Set gradient checkpointing as configured, and training mode."""
    inner = unwrapped(model)
    word = "activation" if hasattr(inner, "activation_checkpointing_enable") else "gradient"  # renamed in 5.23
    if args.checkpoints_activations:
        checkpoint_activations(model, args.gradient_checkpointing_kwargs)
        return model.train()
    if next(inner.parameters()).device.type == "cpu":
        training_heap(returns_blocks=inner is not model)
    if getattr(inner, f"is_{word}_checkpointing", False):
        getattr(inner, f"{word}_checkpointing_disable")()
    return model.train()


def checkpoint_activations(model: Any, kwargs: Mapping[str, Any] | None = None) -> None:
    """Enable activation checkpointing: each block saves its input only and recomputes the rest in the backward pass."""
    inner = unwrapped(model)
    word = "activation" if hasattr(inner, "activation_checkpointing_enable") else "gradient"
    given = {"use_reentrant": False, **(kwargs or {})}
    if next(inner.parameters()).device.type == "cpu":
        training_heap(returns_blocks=True)
        if not given["use_reentrant"] and not given.get("debug"):  # torch refuses the combination
            given.setdefault("context_fn", Recomputing(inner))
    getattr(inner, f"{word}_checkpointing_enable")(**{f"{word}_checkpointing_kwargs": given})
    if inner is not model:
        inner.enable_input_require_grads()  # frozen embeddings would cut the graph at the first block
