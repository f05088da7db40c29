"""Memory that a CPU's kernels and libraries save or keep beside tensors, for a dry run, which cannot call them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from covey.kernels.compile import NUMBERS, unavailable_reason
from covey.kernels.fused_model import would_fuse
from covey.kernels.matmul import ONEDNN_BYTES_PER_SHAPE, is_onednn_faster
from covey.kernels.matmul_bf16 import is_for_this_processor


@dataclass(frozen=True)
class Footprint:
    """Bytes of a learner's forward and backward pass that tensors of PyTorch's own operations do not show."""

    saved_a_token: int
    """Bytes of one layer for one token that the backward does not need."""
    kept_a_product: int
    """Bytes of code that oneDNN keeps for each size of product, where it multiplies."""


def footprint(model: Any, dtype: torch.dtype) -> Footprint:
    """Of a causal language model, loaded or not, whose products run in `dtype`.

    A fused norm keeps its input and one number, a fused gated layer the outputs of its two projections. Behind an adapter norms
    are frozen and keep as little without kernels.
    """
    is_narrow = dtype in (torch.bfloat16, torch.float16)
    in_kernels = is_narrow and unavailable_reason() is None and is_for_this_processor()
    kept = ONEDNN_BYTES_PER_SHAPE if is_onednn_faster() or (is_narrow and not in_kernels) else 0
    if dtype not in NUMBERS or not would_fuse(model):  # no kernels for float64 and float16
        return Footprint(0, kept)
    text = model.config.get_text_config()
    width, inner = text.hidden_size, text.intermediate_size
    if hasattr(model, "peft_config"):
        return Footprint(2 * inner if is_narrow else 4 * inner, kept)
    return Footprint(14 * width + 4 * inner if is_narrow else 8 * inner, kept)
