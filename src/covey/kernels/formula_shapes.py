"""Shapes and constants that the compiled formulas of a model's layers have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class FormulaShapes:
    """Sizes and types that the formulas of `fused_layers` compile for. The defaults are of no model."""

    hidden: int = 64
    inner: int = 64
    """Width inside of a gated MLP."""
    heads: tuple[int, int, int] = (2, 1, 16)
    """Heads of queries and of keys, and their width."""
    weights: torch.dtype = torch.float32
    """Type of the norms' weights."""
    epsilon: float = 1e-6

    @staticmethod
    def of(layer: Any) -> FormulaShapes:
        """Those of a decoder layer; the defaults where a part is not as expected, or `layer` is None."""
        norm, attention, mlp = (getattr(layer, name, None) for name in ("input_layernorm", "self_attn", "mlp"))
        parts = [*(getattr(attention, name, None) for name in ("q_proj", "k_proj")), getattr(mlp, "gate_proj", None)]
        queries, keys, inner = (int(getattr(part, "out_features", 0)) for part in parts)
        weight, width = getattr(norm, "weight", None), int(getattr(attention, "head_dim", 0))
        epsilon = epsilon_of(norm)
        if not isinstance(weight, torch.Tensor) or epsilon is None or not (width and keys and inner):
            return OF_NO_MODEL
        return FormulaShapes(len(weight), inner, (queries // width, keys // width, width), weight.dtype, epsilon)


OF_NO_MODEL = FormulaShapes()


def epsilon_of(norm: Any) -> float | None:
    """Epsilon of an RMS norm, by the names of transformers; None for another module."""
    for name in ("variance_epsilon", "eps"):
        value = getattr(norm, name, None)
        if isinstance(value, float):
            return value
    return None
