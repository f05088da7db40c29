"""The model as a sampler needs it, and afterwards as the trainer left it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Dropout off and no gradient inside; each module's own mode comes back whatever happens.

    Layers recompute activations (gradient checkpointing, which forbids a cache) in training mode only, so this ends that too.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:  # one by one: `model.eval()` would walk, and write to, all of them
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def unwrapped(model: Any) -> Any:
    """The causal LM inside of adapters and of wrappers for several processes."""
    while not hasattr(model, "config") and hasattr(model, "module"):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def accepts(model: Any, name: str) -> bool:
    """Whether the model's forward has a parameter of this name."""
    return name in inspect.signature(unwrapped(model).forward).parameters
