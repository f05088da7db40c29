"""Memory that the kernels of a CPU save beside PyTorch's own operations, for an estimate that cannot run them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from covey.compiled import why_not
from covey.compiled.linear import is_for_this_processor
from covey.fused_layers import would_fuse


@dataclass(frozen=True)
class Footprint:
    """What a learner's forward and backward pass holds less with kernels."""

    saved_a_token: int
    """Bytes of one layer for one token that the backward does not need."""
    keeps_products: bool
    """Whether oneDNN keeps code for each size of product, as it does where the kernels do not multiply."""


def footprint(model: Any, dtype: torch.dtype) -> Footprint:
    """Of a causal language model, loaded or not, whose products run in `dtype`.

    A fused norm keeps its input and one number, a fused gated layer the outputs of its two projections. Behind an adapter norms
    are frozen and keep as little without kernels.
    """
    is_narrow = dtype in (torch.bfloat16, torch.float16)
    keeps_products = not (is_narrow and why_not() is None and is_for_this_processor())
    if not would_fuse(model):
        return Footprint(0, keeps_products)
    text = model.config.get_text_config()
    width, inner = text.hidden_size, text.intermediate_size
    if hasattr(model, "peft_config"):
        return Footprint(2 * inner if is_narrow else 4 * inner, keeps_products)
    return Footprint(14 * width + 4 * inner if is_narrow else 8 * width + 8 * inner, keeps_products)
