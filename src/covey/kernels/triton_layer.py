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
    HAS_WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """RMS norm of a row of `x + update`, times `weight + OFFSET`; the sum replaces `x`."""
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
    if HAS_WEIGHT:
        normed *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + OFFSET
    tl.store(out + row * width + at, normed.to(out.dtype.element_ty), mask=inside)


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


@triton.jit
def _rotate(
    x,
    cosines,
    sines,
    out,
    length,
    heads,
    x_batch,
    x_head,
    x_token,
    table_row,
    width,
    turned,
    PAIRS: tl.constexpr,
    BY_PAIR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotary embedding of one head of a token in the first `turned` of its `width` numbers; the others are copied."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = x + (token // length) * x_batch + (token % length) * x_token + head * x_head
    target = out + ((token // length) * heads + head) * length * width + (token % length) * width
    at = tl.arange(0, BLOCK)
    half = turned // 2
    if PAIRS:
        is_first, pair = at % 2 == 0, at // 2
        other = tl.where(is_first, at + 1, at - 1)
    else:
        is_first, pair = at < half, at % half
        other = tl.where(is_first, at + half, at - half)
    angle = token * table_row + (pair if BY_PAIR else at)
    turns = at < turned
    number = tl.load(source + at, mask=at < width, other=0.0).to(tl.float32)
    partner = tl.load(source + other, mask=turns, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + angle, mask=turns, other=1.0).to(tl.float32)
    sine = tl.load(sines + angle, mask=turns, other=0.0).to(tl.float32)
    rotated = number * cosine + tl.where(is_first, -partner, partner) * sine
    tl.store(target + at, rotated.to(out.dtype.element_ty), mask=at < width)


def add_norm(x: Tensor, update: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """[R, H] in `dtype`: RMS norm of `x + update`, times `weight` [H]. `x` [R, H], contiguous, is updated in place."""
    return _normed(x, update, weight, epsilon, dtype, offset=0.0, rounds=x.dtype != torch.float32)


def norm(x: Tensor, weight: Tensor | None, epsilon: float, offset: float, dtype: torch.dtype) -> Tensor:
    """RMS norm over the last dimension, times `weight + offset`, computed in float32 and rounded to `dtype` once."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    return _normed(flat, None, weight, epsilon, dtype, offset, rounds=False).view(x.shape)


def _normed(
    x: Tensor,
    update: Tensor | None,
    weight: Tensor | None,
    epsilon: float,
    dtype: torch.dtype,
    offset: float,
    rounds: bool,
) -> Tensor:
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    block = triton.next_power_of_2(width)
    # fmt: off
    _add_norm[(rows,)](
        x, x if update is None else update, x if weight is None else weight, out,
        0 if update is None else update.stride(0), width, epsilon,
        HAS_UPDATE=update is not None, HAS_WEIGHT=weight is not None, OFFSET=offset, ROUNDS=rounds, BLOCK=block,
        num_warps=min(16, max(4, block // 512)),
    )
    # fmt: on
    return out


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, pairs: bool, by_pair: bool, dtype: torch.dtype) -> Tensor:
    """Rotary embedding of `x` [B, H, S, D] in `dtype`, computed in float32; `cosines` and `sines` are [B or 1, S, T].

    Partners are neighbours with `pairs`, else a half apart. Tables have an entry a partner with `by_pair`, of which they may
    repeat the first half, else an entry a number. Numbers beyond those that turn are copied.
    """
    batch, heads, length, width = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    cosines, sines = (table.expand(batch, -1, -1).contiguous() for table in (cosines, sines))
    table = cosines.shape[-1]
    turned = 2 * table if by_pair and not pairs else table
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    # fmt: off
    _rotate[(batch * length, heads)](
        x, cosines, sines, out, length, heads, x.stride(0), x.stride(1), x.stride(2), table, width, turned,
        PAIRS=pairs, BY_PAIR=by_pair, BLOCK=triton.next_power_of_2(width), num_warps=1,
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
