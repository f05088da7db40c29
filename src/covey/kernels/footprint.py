"""Memory effects of the CPU kernels and libraries, for a dry run, which cannot call them."""

from dataclasses import dataclass
from typing import Any

import torch

from covey.kernels.compile import NUMBERS
from covey.kernels.fused_model import would_fuse
from covey.kernels.matmul import ONEDNN_BYTES_PER_SHAPE, is_onednn_faster


@dataclass(frozen=True)
class Footprint:
    """Corrections in bytes to the memory of a forward and backward pass by PyTorch's own operations."""

    saved_a_token: int
    """Bytes per layer and token that fused kernels do not save for the backward."""
    saved_per_product: int
    """Bytes of compiled code that oneDNN keeps for each matmul shape, if it is used."""


def footprint(model: Any, dtype: torch.dtype) -> Footprint:
    """Footprint of a causal language model, loaded or on the meta device, with matmuls in `dtype`.

    A fused norm saves its input and one number, a fused gated MLP the outputs of its two projections. With an adapter, norms
    are frozen and save as little without kernels.
    """
    is_narrow = dtype in (torch.bfloat16, torch.float16)
    onednn_bytes = ONEDNN_BYTES_PER_SHAPE if is_narrow or is_onednn_faster() else 0
    if dtype not in NUMBERS or not would_fuse(model):  # no kernels for float64 and float16
        return Footprint(0, onednn_bytes)
    text = model.config.get_text_config()
    width, inner = text.hidden_size, text.intermediate_size
    if hasattr(model, "peft_config"):
        return Footprint(2 * inner if is_narrow else 4 * inner, onednn_bytes)
    return Footprint(14 * width + 4 * inner if is_narrow else 8 * (width + inner), onednn_bytes)
