"""Preparation of a model for training: gradient checkpointing, optimizer and learning-rate schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from covey.errors import ConfigError, ModelError
from covey.kernels import Recomputing, training_heap
from covey.models import first_line
from covey.process.lean import imported


def prepare_for_training(model: Any, args: Any) -> Any:
    """Gradient checkpointing on or off as asked for; the model in training mode."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    word = "activation" if hasattr(inner, "activation_checkpointing_enable") else "gradient"  # renamed in 5.23
    if args.checkpoints_activations:
        checkpoint_activations(model, args.gradient_checkpointing_kwargs)
        return model.train()
    if next(inner.parameters()).device.type == "cpu":
        training_heap(recomputes=False)
    if getattr(inner, f"is_{word}_checkpointing", False):
        getattr(inner, f"{word}_checkpointing_disable")()
    return model.train()


def checkpoint_activations(model: Any, kwargs: Mapping[str, Any] | None = None) -> None:
    """From now on each block keeps its input only and computes the rest again in the backward pass."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    word = "activation" if hasattr(inner, "activation_checkpointing_enable") else "gradient"
    given = {"use_reentrant": False, **(kwargs or {})}
    if next(inner.parameters()).device.type == "cpu":
        training_heap(recomputes=True)
        if not given["use_reentrant"] and not given.get("debug"):  # which torch refuses together
            given.setdefault("context_fn", Recomputing(inner))
    getattr(inner, f"{word}_checkpointing_enable")(**{f"{word}_checkpointing_kwargs": given})
    if inner is not model:
        inner.enable_input_require_grads()  # frozen embeddings would cut the graph at the first block


def make_optimizer(args: Any, model: Any, extra: Sequence[nn.Module] = ()) -> torch.optim.Optimizer:
    """The optimizer that `args.optim` names, over the trainable parameters of `model` and of `extra` modules (a critic).

    Weight decay leaves out biases and norms, as in transformers.
    """
    get_parameter_names = imported("transformers.trainer_pt_utils").get_parameter_names

    norms = [nn.LayerNorm]
    patterns = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("The model has no trainable parameters; unfreeze some, or pass peft_config=.")
    with_decay: list[nn.Parameter] = []
    without: list[nn.Parameter] = []
    for module in (model, *extra):
        decayed = set(get_parameter_names(module, norms, patterns))
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                (with_decay if name in decayed else without).append(parameter)
    groups = [
        {"params": with_decay, "weight_decay": args.weight_decay},
        {"params": without, "weight_decay": 0.0},
    ]
    make, kwargs = imported("transformers.trainer").Trainer.get_optimizer_cls_and_kwargs(args, model)
    if "params" in kwargs or "model" in kwargs or "optimizer_dict" in kwargs:
        raise ConfigError(
            f"optim={args.optim} builds its own parameter groups, which Covey cannot checkpoint; use adamw_torch."
        )
    try:
        return make([group for group in groups if group["params"]], **kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optim={str(getattr(args.optim, 'value', args.optim))!r} cannot be made with these options: {first_line(error)}"
        ) from error


def make_scheduler(args: Any, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
    """The learning-rate schedule that `args.lr_scheduler_type` names, over `total_steps` optimizer steps."""
    from transformers import get_scheduler

    try:
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(total_steps),
            num_training_steps=total_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
    except (TypeError, ValueError, ZeroDivisionError, LookupError, AttributeError) as error:
        given = f"lr_scheduler_type={str(getattr(args.lr_scheduler_type, 'value', args.lr_scheduler_type))!r}"
        raise ConfigError(
            f"{given} cannot be made with lr_scheduler_kwargs={args.lr_scheduler_kwargs!r}: {first_line(error)}"
        ) from error
