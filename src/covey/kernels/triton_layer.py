"""Elementwise parts of a decoder layer in a decode step: Triton kernels that read and write each number once.

Rounding is that of transformers' modules as the learner runs them: a normed value is rounded to the type of the residual stream before its
weight is applied, and SiLU is rounded to the type of the products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GATE_BLOCK = 1024
"""Outputs of a program of the gated MLP."""


@triton.jit
def _add_norm(
    x,
    update,
    weight,
    out,
    update_row,
    width,
    epsilon,
    HAS_UPDATE: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """RMS norm of a row of `x + update`; the sum replaces `x`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    total = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    kind: tl.constexpr = x.dtype.element_ty
    if HAS_UPDATE:
        total += tl.load(update + row * update_row + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + row * width + at, total.to(kind), mask=inside)
        total = total.to(kind).to(tl.float32) if ROUNDS else total
    normed = total * tl.rsqrt(tl.sum(total * total, 0) / width + epsilon)
    normed = normed.to(kind).to(tl.float32) if ROUNDS else normed
    scaled = normed * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated(gate, up, out, gate_row, up_row, width, BLOCK: tl.constexpr):
    """`silu(gate) * up` for a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    kind: tl.constexpr = gate.dtype.element_ty
    x = tl.load(gate + row * gate_row + at, mask=inside, other=0.0).to(tl.float32)
    opened = (x * tl.sigmoid(x)).to(kind).to(tl.float32)
    product = opened * tl.load(up + row * up_row + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, product.to(kind), mask=inside)


def add_norm(x: Tensor, update: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """[R, H] in `dtype`: RMS norm of `x + update`, times `weight` [H]. `x` [R, H], contiguous, is updated in place."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    block = triton.next_power_of_2(width)
    # fmt: off
    _add_norm[(rows,)](
        x, x if update is None else update, weight, out, 0 if update is None else update.stride(0), width, epsilon,
        HAS_UPDATE=update is not None, ROUNDS=x.dtype != torch.float32, BLOCK=block,
        num_warps=min(16, max(4, block // 512)),
    )
    # fmt: on
    return out


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, [R, I] each; rows may be strided, as halves of one product are."""
    rows, width = gate.shape
    out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    grid = (rows, triton.cdiv(width, GATE_BLOCK))
    _gated[grid](gate, up, out, gate.stride(0), up.stride(0), width, BLOCK=GATE_BLOCK)
    return out
