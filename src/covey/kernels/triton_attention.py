"""Decode attention on a GPU: Triton kernels over the engine's own cache, for groups that share their prompt.

The keys of a prompt are read once for all queries of its group, those of a completion for its own; long parts are split
over programs (split-K). Every split leaves its output and log-sum-exp in float32, and a last kernel merges them. No
kernel argument depends on the step: lengths, owners and the step column are read from tensors, so that a CUDA graph can
replay a step. `by_one_softmax` and `by_flash` in `attention.py` compute the same with PyTorch's own operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_KEYS = 64
"""Keys per block of a program; half as many in float32, to fit in the same shared memory."""
MAX_QUERIES = 64
"""Queries per load of the keys (half in float32); a larger group loads them again, from the L2 cache."""
SPLIT_KEYS = 256
"""Number of keys from which a part is split over programs (split-K), unless there are enough programs already."""


@dataclass(frozen=True, eq=False)
class Spans:
    """Index tables between rows and keys, read by the kernels. R rows, P prompts of at most G rows each."""

    members: Tensor
    """[P, G] int64, rows of each prompt."""
    counts: Tensor
    """[P] int32, number of rows of each prompt."""
    lengths: Tensor
    """[P] int32, number of keys of each prompt."""
    owned: Tensor
    """[R] int32, 1 for a row that belongs to a prompt, 0 for an unused row."""
    first: Tensor
    """[R] int32, first column of each row's own keys."""
    step_column: Tensor
    """[1] int64, the last column of every row."""


@triton.jit
def _append(
    key, value, keys, values, step_column, from_row, from_head, row_stride, head_stride, D, BLOCK_D: tl.constexpr
):
    """Write one key and one value of a row and head to the step column."""
    row, head = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, BLOCK_D)
    inside = at < D
    source = row * from_row + head * from_head + at
    to = row.to(tl.int64) * row_stride + head * head_stride + tl.load(step_column) * D + at
    tl.store(keys + to, tl.load(key + source, mask=inside), mask=inside)
    tl.store(values + to, tl.load(value + row * D * tl.num_programs(1) + head * D + at, mask=inside), mask=inside)


# fmt: off
@triton.jit(do_not_specialize=["group", "splits", "stop_stride", "stop_more", "first_split", "num_rows"])
def _part(
    query, keys, values, bias, members, counts, first, stop, outs, lses,
    scale, softcap, repeats, group, splits, query_row, batch_stride, head_stride, bias_stride, stop_stride, stop_more,
    first_split, num_rows, D,
    HAS_FIRST: tl.constexpr, HAS_MEMBERS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):
    # fmt: on
    """Attention of one tile of a part's queries over one split of its keys, for one key head."""
    # house: long, because a kernel is one function
    b, h = tl.program_id(0), tl.program_id(1)
    tile, split = tl.program_id(2) // splits, tl.program_id(2) % splits
    q = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    count = tl.load(counts + b) * repeats if HAS_MEMBERS else repeats
    if tile * BLOCK_Q < count:
        is_query = q < count
        row = tl.load(members + b * group + q // repeats, mask=is_query, other=0) if HAS_MEMBERS else b + q * 0
        head = h * repeats + q % repeats  # of the queries
        d = tl.arange(0, BLOCK_D)
        inside = d < D
        asked = tl.load(
            query + row[:, None] * query_row + head[:, None] * D + d[None, :],
            mask=is_query[:, None] & inside[None, :],
            other=0.0,
        )
        if WIDEN:
            asked = asked.to(tl.float32)
        low = tl.load(first + b) if HAS_FIRST else 0
        high = (tl.load(stop + b * stop_stride) + stop_more).to(tl.int32)
        chunk = tl.cdiv(tl.cdiv(high - low, splits), BLOCK_K) * BLOCK_K
        begin = low + split * chunk
        end = tl.minimum(begin + chunk, high)
        here = b.to(tl.int64) * batch_stride + h * head_stride
        top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
        out = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
        for start in range(begin, end, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            is_key = k < end
            place = here + k[:, None] * D + d[None, :]  # [K, D]
            mask = is_key[:, None] & inside[None, :]
            known = tl.load(keys + place, mask=mask, other=0.0)
            if WIDEN:
                known = known.to(tl.float32)
            scores = tl.dot(asked, tl.trans(known), input_precision="ieee") * scale
            if HAS_SOFTCAP:
                scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # tanh
            hidden = tl.load(bias + b.to(tl.int64) * bias_stride + k, mask=is_key, other=0.0).to(tl.float32)
            scores = tl.where(is_key[None, :], scores + hidden[None, :], float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            keep = tl.exp(top - higher)
            said = tl.load(values + place, mask=mask, other=0.0)
            total = total * keep + tl.sum(weights, 1)
            weights = weights.to(said.dtype)
            if WIDEN:
                weights, said = weights.to(tl.float32), said.to(tl.float32)
            out = out * keep[:, None] + tl.dot(weights, said, input_precision="ieee")
            top = higher
        is_empty = begin >= end
        lse = tl.where(is_empty, float("-inf"), top + tl.log(tl.where(is_empty, 1.0, total)))
        out = out / tl.where(is_empty, 1.0, total)[:, None]
        heads_out = tl.num_programs(1) * repeats
        to = (first_split + split).to(tl.int64) * num_rows * heads_out + row * heads_out + head
        tl.store(lses + to, lse, mask=is_query)
        tl.store(outs + to[:, None] * D + d[None, :], out, mask=is_query[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["shared", "splits"])
def _merge(outs, lses, owned, result, shared, splits, D, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    """Merge the outputs of all splits, the first `shared` of them the prompt's, by their log-sum-exps."""
    row, head = tl.program_id(0), tl.program_id(1)
    rows, heads = tl.num_programs(0), tl.num_programs(1)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    is_part = (s < splits) & (s >= shared * (1 - tl.load(owned + row)))
    at = s.to(tl.int64) * rows * heads + row * heads + head
    lse = tl.load(lses + at, mask=is_part, other=float("-inf"))
    top = tl.max(lse, 0)
    weights = tl.exp(lse - tl.where(top == float("-inf"), 0.0, top))
    mask = is_part[:, None] & (d < D)[None, :]
    out = tl.load(outs + at[:, None] * D + d[None, :], mask=mask, other=0.0)
    merged = tl.sum(out * weights[:, None], 0) / tl.maximum(tl.sum(weights, 0), 1e-30)
    tl.store(result + (row.to(tl.int64) * heads + head) * D + d, merged.to(result.dtype.element_ty), mask=d < D)


def append(key: Tensor, value: Tensor, buffer: Tensor, step_column: Tensor) -> None:
    """Write the new `key` and `value` [R, Hkv, D] of each row into the step column of `buffer` [2, rows, Hkv, C, D]."""
    rows, heads, width = key.shape
    if key.stride(2) != 1:
        key = key.contiguous()
    value = value.contiguous()
    keys, values = buffer[0], buffer[1]
    # fmt: off
    _append[(rows, heads)](
        key, value, keys, values, step_column, key.stride(0), key.stride(1), keys.stride(0), keys.stride(1), width,
        BLOCK_D=triton.next_power_of_2(width),
    )
    # fmt: on


def decode(
    query: Tensor,
    own: Tensor,
    own_bias: Tensor,
    shared: Tensor,
    shared_bias: Tensor,
    spans: Spans,
    scale: float,
    softcap: float | None = None,
    *,
    splits: tuple[int, int] | None = None,
) -> Tensor:
    """[R, Hq, D] attention of one query a row over its prompt's keys and its own, in the precision of `query` [R, Hq, D].

    `own` [2, rows, Hkv, C, D] and `shared` [2, P, Hkv, K, D] hold keys and values, the biases [rows, C] and [P, K] are
    added to their scores. `splits` fixes the numbers of splits of the prompt's and the own keys.
    """
    query = query.contiguous()
    rows, heads, width = query.shape
    key_heads, repeats = own.shape[2], heads // own.shape[2]
    prompts, group = spans.members.shape if shared.shape[3] else (0, 1)
    if splits is None:
        enough = programs_of(query.device)
        tiles = triton.cdiv(group * repeats, _queries(group * repeats, query))
        splits = (
            pieces(shared.shape[3], prompts * key_heads * tiles, enough),
            pieces(own.shape[3], rows * key_heads, enough),
        )
    of_shared, of_own = splits[0] if prompts else 0, splits[1]
    outs = torch.empty(of_shared + of_own, rows, heads, width, dtype=torch.float32, device=query.device)
    lses = torch.empty(of_shared + of_own, rows, heads, dtype=torch.float32, device=query.device)
    if of_shared:
        _attend(query, shared, shared_bias, spans, (outs, lses), (0, of_shared), group, scale, softcap)
    _attend(query, own, own_bias, spans, (outs, lses), (of_shared, of_own), None, scale, softcap)
    result = torch.empty_like(query)
    pieces_wide, width_wide = triton.next_power_of_2(of_shared + of_own), triton.next_power_of_2(width)
    _merge[(rows, heads)](
        outs,
        lses,
        spans.owned,
        result,
        of_shared,
        of_shared + of_own,
        width,
        BLOCK_S=pieces_wide,
        BLOCK_D=width_wide,
    )
    return result


def _attend(
    query: Tensor,
    buffer: Tensor,
    bias: Tensor,
    spans: Spans,
    out: tuple[Tensor, Tensor],
    splits: tuple[int, int],
    group: int | None,
    scale: float,
    softcap: float | None,
) -> None:
    """Launch the kernel for one part: the prompts' with at most `group` rows each, or every row's own. `splits`: (first, count)."""
    rows, heads, width = query.shape
    is_shared, repeats = group is not None, heads // buffer.shape[2]
    queries = (group or 1) * repeats
    block_q = _queries(queries, query)
    parts = len(spans.members) if is_shared else rows
    # fmt: off
    _part[(parts, buffer.shape[2], triton.cdiv(queries, block_q) * splits[1])](
        query, buffer[0], buffer[1], bias, spans.members, spans.counts, spans.first,
        spans.lengths if is_shared else spans.step_column, *out,
        scale, 1.0 if softcap is None else softcap, repeats, group or 1, splits[1], query.stride(0),
        buffer.stride(1), buffer.stride(2), bias.stride(0), int(is_shared), int(not is_shared), splits[0], rows, width,
        HAS_FIRST=not is_shared, HAS_MEMBERS=is_shared, HAS_SOFTCAP=softcap is not None,
        WIDEN=query.dtype == torch.bfloat16 and is_interpreted(),
        BLOCK_D=max(16, triton.next_power_of_2(width)), BLOCK_Q=block_q, BLOCK_K=BLOCK_KEYS // _halves(query),
    )
    # fmt: on


def _queries(count: int, query: Tensor) -> int:
    """Query rows of a program's tile for a part with this many queries."""
    return max(16, min(MAX_QUERIES // _halves(query), triton.next_power_of_2(count)))


def _halves(query: Tensor) -> int:
    """Divisor of block sizes: 2 in float32, which takes twice the shared memory, else 1."""
    return 2 if query.dtype == torch.float32 else 1


def is_interpreted() -> bool:
    """True in Triton's interpreter on a CPU, whose dot products lack bfloat16 and use float32."""
    return bool(triton.knobs.runtime.interpret)


def pieces(keys: int, programs: int, enough: int) -> int:
    """Number of splits of a part with at most `keys` keys, given `programs` programs without splitting."""
    return max(1, min(keys // SPLIT_KEYS, -(-enough // max(programs, 1))))


def programs_of(device: torch.device) -> int:
    """Number of programs that fill this device: four per multiprocessor."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
