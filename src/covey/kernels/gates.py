"""Gated activations of transformers' MLPs (Shazeer 2020, "GLU Variants Improve Transformer"), recognised by their numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from covey.errors import RAW_ERRORS
from covey.kernels.norms import agree

SILU = "silu"
_ACTIVATIONS = (SILU, "none", "tanh")
"""SiLU, and GELU by its `approximate`."""
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_MERGED = ("gate_up_proj", "down_proj")


class Gate(NamedTuple):
    """Form of a gated MLP: its activation, and whether one product computes gate and up, in this order."""

    activation: str
    is_merged: bool = False


def gated(gate: Tensor, up: Tensor, activation: str = SILU) -> Tensor:
    """`activation(gate) * up` [M, F], computed in float32."""
    return (_activated(gate.float(), activation) * up.float()).to(gate.dtype)


def gated_backward(gradient: Tensor, gate: Tensor, up: Tensor, activation: str = SILU) -> tuple[Tensor, Tensor]:
    """Gradients of `gate` and `up`."""
    wide, upstream = gate.float(), gradient.float()
    of_opened = upstream * up.float()
    if activation == SILU:
        share = torch.sigmoid(wide)
        of_gate = of_opened * share * (1 + wide * (1 - share))
    else:
        of_gate = torch.ops.aten.gelu_backward(of_opened, wide, approximate=activation)
    return of_gate.to(gate.dtype), (upstream * _activated(wide, activation)).to(up.dtype)


def gated_halves(both: Tensor, activation: str) -> Tensor:
    """`gated` of the halves of `both` [M, 2 F]."""
    gate, up = both.chunk(2, -1)
    return gated(gate, up, activation)


def gated_halves_backward(gradient: Tensor, both: Tensor, activation: str) -> tuple[Tensor]:
    """Gradient of `both`."""
    gate, up = both.chunk(2, -1)
    return (torch.cat(gated_backward(gradient, gate, up, activation), -1),)


def _activated(x: Tensor, activation: str) -> Tensor:
    return F.silu(x) if activation == SILU else F.gelu(x, approximate=activation)


def has_projections(mlp: nn.Module, names: tuple[str, ...] = _PROJECTIONS) -> bool:
    return all(isinstance(getattr(mlp, name, None), nn.Module) for name in names)


def recognised_gate(mlp: Any) -> Gate | None:
    """Form of a module that computes `down(activation(gate(x)) * up(x))` without dropout; None for another."""
    is_merged = has_projections(mlp, _MERGED)
    if "forward" in mlp.__dict__ or not (is_merged or has_projections(mlp)):
        return None
    weight = next(mlp.parameters())
    if weight.ndim != 2 or not weight.is_floating_point():
        return None
    first = mlp.gate_up_proj if is_merged else mlp.gate_proj
    x = torch.randn(3, getattr(first, "in_features", weight.shape[1])).to(weight.device, weight.dtype)
    modes = {module: module.training for module in mlp.modules()}
    mlp.train()
    for name in _MERGED if is_merged else _PROJECTIONS:  # an adapter's dropout is applied in both cases
        getattr(mlp, name).eval()
    try:
        if (activation := _activation_of(mlp)) is None:
            return None
        gate, up = first(x).chunk(2, -1) if is_merged else (first(x), mlp.up_proj(x))
        agrees = agree(mlp.forward(x), mlp.down_proj(gated(gate, up, activation)))
        return Gate(activation, is_merged) if agrees else None
    except RAW_ERRORS:
        return None
    finally:
        for module, mode in modes.items():
            module.training = mode


def _activation_of(mlp: nn.Module) -> str | None:
    """The activation by its own numbers, which tell GELU from its approximation; SiLU for a module that does not show it."""
    functions = (getattr(mlp, name, None) for name in ("act_fn", "activation_fn"))
    function: Any = next(filter(callable, functions), F.silu)
    x = torch.linspace(-4, 4, 65, device="cpu")
    return next((a for a in _ACTIVATIONS if torch.allclose(function(x), _activated(x, a), rtol=1e-5, atol=1e-6)), None)
