"""Experts of fused layers, whose weights [E, N, K] lie in one parameter, under autocast: products in its type, as all others.

transformers multiplies them by `grouped_mm`, which is not on autocast's list: float32 weights would be multiplied in float32.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


def autocast_dtype(device: str) -> torch.dtype | None:
    """Type of products under autocast on this kind of device; None outside of autocast."""
    is_cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_cast else None


def expert_weights(module: nn.Module) -> tuple[str, ...]:
    """Names of the weights [E, ., .] of a module of fused experts, by transformers' interface of them; none for other modules.

    Biases [E, N] stay in float32: their gradients are sums over tokens.
    """
    if not hasattr(type(module), "_apply_gate"):
        return ()
    return tuple(name for name, weight in module.named_parameters(recurse=False) if weight.ndim == 3)


def narrow_experts(model: nn.Module) -> None:
    """Let the fused experts of this model compute in autocast's type from now on; copies of the model do so too."""
    for module in model.modules():
        if names := expert_weights(module):
            module.__dict__.setdefault("forward", partial(experts_forward, module, names))


def experts_forward(experts: Any, names: tuple[str, ...], *args: Any, **others: Any) -> Any:
    """Output of a module of experts, its weights cast as autocast casts those of a linear layer."""
    dtype = autocast_dtype(next(iter((*args, *others.values()))).device.type)
    weights = {} if dtype is None else {name: getattr(experts, name) for name in names}
    if all(weight.dtype == dtype for weight in weights.values()):
        return type(experts).forward(experts, *args, **others)
    return compute_with(experts, {name: weight.to(dtype) for name, weight in weights.items()}, *args, **others)


def compute_with(experts: nn.Module, weights: Mapping[str, Tensor], *args: Any, **others: Any) -> Any:
    """Output of the experts' class with other weights by name. The module stays as it is: threads may share it."""
    kind: Any = parametrize.type_before_parametrizations(
        experts
    )  # for a pass, PEFT makes properties of adapted weights
    view = kind.__new__(kind)
    view.__dict__.update(experts.__dict__, **weights)
    return kind.forward(view, *args, **others)
