"""RMS norms of transformers' modules, recognised by their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covey.errors import RAW_ERRORS
from covey.kernels.formula_shapes import epsilon_of


@dataclass(frozen=True)
class Norm:
    """Formula of an RMS norm."""

    epsilon: float
    offset: float
    """Number that is added to the weight: 1 where weights begin at 0, as in Gemma."""

    def __call__(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """The formula by PyTorch's operations, in the type of `x`."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (normed if weight is None else normed * (weight.float() + self.offset)).to(x.dtype)


def weight_of(module: Any) -> Tensor | None:
    """The live weight of a norm, without gradient; None for one without."""
    weight: Tensor | None = getattr(module, "weight", None)
    return None if weight is None else weight.detach()


def recognised_norm(module: Any) -> Norm | None:
    """RMSNorm with or without a weight; None for another module, by its class's `forward`."""
    epsilon, parameters = epsilon_of(module), dict(module.named_parameters())
    if epsilon is None or set(parameters) - {"weight"} or any(x.ndim != 1 for x in parameters.values()):
        return None
    weight, width = weight_of(module), len(parameters.get("weight", range(64)))
    x = torch.randn(3, width, device="cpu").to("cpu" if weight is None else weight.device)
    plain = type(module).forward
    try:
        want = plain(module, x)
        kinds = [kind for kind in (Norm(epsilon, 0.0), Norm(epsilon, 1.0)) if agree(kind(x, weight), want.float())]
    except RAW_ERRORS:
        return None
    return kinds[0] if kinds else None


def agree(mine: Tensor, two: Tensor) -> bool:
    """True if equal up to rounding, relative to the largest number; all zeros prove nothing."""
    top = float(two.abs().max())
    slack = 1e-4 if mine.dtype == torch.float32 else 3e-2
    return mine.shape == two.shape and top > 0 and float((mine.float() - two.float()).abs().max()) < slack * top
