"""The effect of this machine's kernels and libraries on the memory of training on its CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from covey.kernels.compile import unavailable_reason
from covey.kernels.fused_model import would_fuse
from covey.kernels.matmul import ONEDNN_BYTES_PER_SHAPE, fits_bf16, is_onednn_faster, padded_rows
from covey.kernels.matmul_bf16 import is_for_this_processor


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Facts for an estimate of memory on a CPU."""

    fuses_layers: bool
    """Decoder layers run in fused kernels, which keep less for the backward pass."""
    multiplies_bf16: bool
    """bfloat16 products run in Covey's kernels: no cast weights, no code kept for each shape."""
    multiplies_fp32_by_onednn: bool
    """float32 products run in oneDNN, which keeps code for each shape."""
    bytes_per_shape: int
    """Of oneDNN's code for one matmul shape."""

    @staticmethod
    def fits_bf16(inside: int, outside: int) -> bool:
        """True if the bfloat16 kernels take a layer with this many inputs and outputs."""
        return fits_bf16(inside, outside)

    @staticmethod
    def padded(tokens: int) -> int:
        """Length that a row of `tokens` is padded to on a CPU."""
        return padded_rows(tokens)


def footprint(model: Any = None) -> Footprint:
    """The footprint of a model, loaded or without storage; without one, of the machine alone."""
    return Footprint(
        fuses_layers=model is not None and would_fuse(model),
        multiplies_bf16=unavailable_reason() is None and is_for_this_processor(),
        multiplies_fp32_by_onednn=is_onednn_faster(),
        bytes_per_shape=ONEDNN_BYTES_PER_SHAPE,
    )
