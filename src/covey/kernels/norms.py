"""RMS norms of transformers' modules, recognised by their numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from covey.errors import RAW_ERRORS
from covey.models import autocast_dtype, computing
from covey.process.memory import is_out_of_memory


@dataclass(frozen=True)
class Norm:
    """Formula of an RMS norm."""

    epsilon: float
    offset: float
    """Number that is added to the weight: 1 where weights begin at 0, as in Gemma."""


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, dtype: torch.dtype, offset: float = 0.0) -> Tensor:
    """[M, D] in `dtype`, computed in float32: the norm and the cast that the following products need are one kernel.

    `offset` is added to the weight.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (normed if weight is None else normed * (weight.float() + offset)).to(dtype)


def weight_of(module: nn.Module) -> Tensor | None:
    """The live weight of a norm, without gradient; None for one without."""
    weight: Tensor | None = getattr(module, "weight", None)
    return None if weight is None else weight.detach()


def recognised_norm(module: nn.Module) -> Norm | None:
    """RMSNorm with or without a weight; None for another module, by its class's `forward`."""
    if (epsilon := epsilon_of(module)) is None:
        return None
    parameters = dict(module.named_parameters())
    if set(parameters) - {"weight"} or any(x.ndim != 1 for x in parameters.values()):
        return None
    weight, width = weight_of(module), len(parameters.get("weight", range(64)))
    x = torch.randn(3, width, device="cpu").to("cpu" if weight is None else weight.device)
    try:
        want = type(module).forward(module, x).float()
        offsets = [offset for offset in (0.0, 1.0) if agree(rms_norm(x, weight, epsilon, x.dtype, offset), want)]
    except RAW_ERRORS:
        return None
    return Norm(epsilon, offsets[0]) if offsets else None


def epsilon_of(norm: Any) -> float | None:
    """Epsilon of an RMS norm, by the names of transformers; None for another module."""
    for name in ("variance_epsilon", "eps"):
        value = getattr(norm, name, None)
        if isinstance(value, float):
            return value
    return None


def product_dtype(x: Tensor) -> torch.dtype | None:
    """Type of a product of `x`: autocast's, float32 without; None for 16-bit numbers without autocast, which the modules round."""
    return autocast_dtype(x.device.type) or (x.dtype if x.dtype == torch.float32 else None)


def feeding_products(decoder: nn.Module, norms: Iterable[nn.Module], run: Callable[[], Tensor]) -> Iterator[nn.Module]:
    """Norms whose every reader is a product: in the type of products, they change no bit of what `run` returns.

    Layers alike are tried together. Experts are no such readers: some add up their outputs in the type of their input.
    """
    chosen, roles = set(norms), dict[str, list[nn.Module]]()
    for name, module in decoder.named_modules():
        if module in chosen:
            roles.setdefault(re.sub(r"\.\d+\.", ".", name), []).append(module)
    before = run()
    for alike in roles.values():
        with ExitStack() as stack:
            for module in alike:
                stack.enter_context(computing(module, partial(_rounded, module.forward)))
            try:
                is_same = torch.equal(run(), before)
            except RAW_ERRORS as error:  # of types that do not compute together
                if is_out_of_memory(error):
                    raise
                is_same = False
        if is_same:
            yield from alike


def _rounded(plain: Callable[..., Tensor], /, *args: Any, **others: Any) -> Tensor:
    dtype, out = product_dtype(args[0]) if args else None, plain(*args, **others)
    return out if dtype is None else out.to(dtype)


def agree(mine: Tensor, two: Tensor) -> bool:
    """True if equal up to rounding, relative to the largest number; all zeros prove nothing."""
    top = float(two.abs().max())
    slack = 1e-4 if mine.dtype == torch.float32 else 3e-2
    return mine.shape == two.shape and top > 0 and float((mine.float() - two.float()).abs().max()) < slack * top
