"""Decode attention on a GPU: Triton kernels over the engine's own cache, for groups that share their prompt.

The keys of a prompt are read once for all queries of its group, those of a completion for its own; long parts are split
over programs (split-K). Every split leaves its output and log-sum-exp in float32; the kernel of the own keys merges them, or
a last one where those are split too. It also applies the norms of heads and the rotary embedding, and writes the new key. No
kernel argument depends on the step: lengths, owners and the step column are read from tensors, so that a CUDA graph can
replay a step. `by_one_softmax` in `attention.py` computes the same with PyTorch's own operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_KEYS = 64
"""Keys per block of a program; half as many in float32, and for heads wider than 64, to fit in the same shared memory."""
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


@dataclass(frozen=True, eq=False)
class Rotation:
    """Norms of the heads and rotary embedding, applied to queries and keys inside the attention kernels."""

    cosines: Tensor
    """[positions, D] float32"""
    sines: Tensor
    """[positions, D] float32, negative in the first half of D (`rotate_half`)."""
    positions: Tensor
    """[R] int64, position of each row's token."""
    query_norm: Tensor | None = None
    """[D] float32, RMS norm of each head's queries before the rotation."""
    key_norm: Tensor | None = None
    epsilon: float = 0.0
    rounds: bool = False
    """True: every intermediate result is rounded to the type of the queries, as in a model with such weights."""


@triton.jit
def _rounded(x, KIND: tl.constexpr, ROUNDS: tl.constexpr):
    """`x` in float32, rounded to KIND where ROUNDS."""
    return x.to(KIND).to(tl.float32) if ROUNDS else x


@triton.jit
def _turned(
    x, other, cosine, sine, weight, other_weight, epsilon, D: tl.constexpr, HAS_NORM: tl.constexpr, ROUNDS: tl.constexpr
):
    """Head norm and rotation of `x` [.., D]; `other` holds the halves of D exchanged. The result has the type of `x`."""
    kind: tl.constexpr = x.dtype
    x, other = x.to(tl.float32), other.to(tl.float32)
    if HAS_NORM:
        rms = tl.rsqrt(tl.sum(x * x, 1) / D + epsilon)[:, None]
        x, other = _rounded(x * rms, kind, True) * weight, _rounded(other * rms, kind, True) * other_weight
        x, other = _rounded(x, kind, ROUNDS), _rounded(other, kind, ROUNDS)
    cosine, sine = _rounded(cosine, kind, ROUNDS), _rounded(sine, kind, ROUNDS)
    return (_rounded(x * cosine, kind, ROUNDS) + _rounded(other * sine, kind, ROUNDS)).to(kind)


# fmt: off
@triton.jit
def _heads(
    source, from_row, from_head, row, head, valid, d, cosines, sines, positions, norm, epsilon,
    D: tl.constexpr, ROTATES: tl.constexpr, HAS_NORM: tl.constexpr, ROUNDS: tl.constexpr,
):
    # fmt: on
    """[N, D] vectors of the rows `row` [N] and heads `head` [N], rotated where ROTATES."""
    inside = d < D
    at, mask = source + row[:, None] * from_row + head[:, None] * from_head, valid[:, None] & inside[None, :]
    x = tl.load(at + d[None, :], mask=mask, other=0.0)
    if ROTATES:
        o = tl.where(d < D // 2, d + D // 2, d - D // 2)  # the other half
        other = tl.load(at + o[None, :], mask=mask, other=0.0)
        place = tl.load(positions + row, mask=valid, other=0)[:, None] * D + d[None, :]
        cosine, sine = tl.load(cosines + place, mask=mask, other=0.0), tl.load(sines + place, mask=mask, other=0.0)
        weight, other_weight = 1.0, 1.0
        if HAS_NORM:
            weight = tl.load(norm + d, mask=inside, other=0.0)[None, :]
            other_weight = tl.load(norm + o, mask=inside, other=0.0)[None, :]
        x = _turned(x, other, cosine, sine, weight, other_weight, epsilon, D, HAS_NORM, ROUNDS)
    return x


@triton.jit
def _capped(scores, softcap, HAS_SOFTCAP: tl.constexpr):
    return softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1) if HAS_SOFTCAP else scores  # tanh


# fmt: off
@triton.jit(do_not_specialize=["group", "splits", "stop_stride", "first_split", "num_rows"])
def _part(
    query, key, value, keys, values, bias, members, counts, first, stop, owned, cosines, sines, positions,
    query_norm, key_norm, sinks, outs, lses, result,
    scale, softcap, epsilon, repeats, group, splits, query_row, query_head, key_row, key_head, value_row, value_head,
    batch_stride, head_stride, bias_stride, stop_stride, first_split, num_rows,
    D: tl.constexpr, IS_SHARED: tl.constexpr, MERGES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, ROTATES: tl.constexpr, HAS_NORM: tl.constexpr, ROUNDS: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):
    # fmt: on
    """Attention of one tile of a part's queries over one split of its keys, for one key head.

    The own part (not IS_SHARED) also writes the row's new key and value into the step column, and attends to them, and to the
    sinks, from registers. With MERGES it adds the prompt's splits, computed before, and writes the result.
    """
    # house: long, because a kernel is one function
    b, h = tl.program_id(0), tl.program_id(1)
    tile, split = tl.program_id(2) // splits, tl.program_id(2) % splits
    q = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    count = tl.load(counts + b) * repeats if IS_SHARED else repeats
    if tile * BLOCK_Q >= count:
        return
    is_query = q < count
    row = tl.load(members + b * group + q // repeats, mask=is_query, other=0) if IS_SHARED else b + q.to(tl.int64) * 0
    head = h * repeats + q % repeats  # of the queries
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    # fmt: off
    seeking = _heads(query, query_row, query_head, row, head, is_query, d, cosines, sines, positions, query_norm,
                     epsilon, D, ROTATES, HAS_NORM, ROUNDS)
    # fmt: on
    low = 0 if IS_SHARED else tl.load(first + b)
    high = tl.load(stop + b * stop_stride).to(tl.int32)  # of own keys, the new one comes from registers
    chunk = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), splits), BLOCK_K) * BLOCK_K
    begin = low + split * chunk
    end = tl.minimum(begin + chunk, high)
    here = b.to(tl.int64) * batch_stride + h * head_stride
    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    out = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    if not IS_SHARED:  # noqa: SIM102 - compiled away, and the next is a value on the device
        if split == splits - 1:
            only = tl.arange(0, 1)
            # fmt: off
            new = _heads(key, key_row, key_head, b + only.to(tl.int64), h + only, only == 0, d, cosines, sines,
                         positions, key_norm, epsilon, D, ROTATES, HAS_NORM, ROUNDS)
            # fmt: on
            content = tl.load(value + b.to(tl.int64) * value_row + h * value_head + d, mask=inside, other=0.0)
            column = here + high.to(tl.int64) * D
            writes = d < tl.where(tile == 0, D, 0)  # Triton 3.9's interpreter makes integers of a scalar's comparison
            tl.store(keys + column + only[:, None] + d[None, :], new, mask=writes[None, :])
            tl.store(values + column + d, content, mask=writes)
            top = _capped(tl.sum(seeking.to(tl.float32) * new.to(tl.float32), 1) * scale, softcap, HAS_SOFTCAP)
            if HAS_BIAS:
                top += tl.load(bias + b.to(tl.int64) * bias_stride + high).to(tl.float32)
            total += 1.0
            out += content.to(tl.float32)[None, :]
            if HAS_SINKS:
                sink = tl.load(sinks + head, mask=is_query, other=float("-inf")).to(tl.float32)
                higher = tl.maximum(top, sink)
                total = tl.exp(top - higher)
                out *= total[:, None]
                total += tl.exp(sink - higher)
                top = higher
    if WIDEN:
        seeking = seeking.to(tl.float32)
    for start in range(begin, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        is_key = k < end
        place = here + k[:, None] * D + d[None, :]  # [K, D]
        mask = is_key[:, None] & inside[None, :]
        past = tl.load(keys + place, mask=mask, other=0.0)
        if WIDEN:
            past = past.to(tl.float32)
        scores = _capped(tl.dot(seeking, tl.trans(past), input_precision="ieee") * scale, softcap, HAS_SOFTCAP)
        if HAS_BIAS:
            place_of_bias = row.to(tl.int64)[:, None] * bias_stride + k[None, :]
            hidden = tl.load(bias + place_of_bias, mask=is_query[:, None] & is_key[None, :], other=0.0)
            scores += hidden.to(tl.float32)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        keep = tl.exp(top - higher)
        contents = tl.load(values + place, mask=mask, other=0.0)
        total = total * keep + tl.sum(weights, 1)
        weights = weights.to(contents.dtype)
        if WIDEN:
            weights, contents = weights.to(tl.float32), contents.to(tl.float32)
        out = out * keep[:, None] + tl.dot(weights, contents, input_precision="ieee")
        top = higher
    heads_out = tl.num_programs(1) * repeats
    a_split = num_rows.to(tl.int64) * heads_out
    to = row.to(tl.int64) * heads_out + head
    mask = is_query[:, None] & inside[None, :]
    if MERGES:
        is_owned = q < tl.where(tl.load(owned + b) != 0, count, 0)
        for of_prompt in range(first_split):
            place = of_prompt * a_split + to
            lse = tl.load(lses + place, mask=is_owned, other=float("-inf"))
            part = tl.load(outs + place[:, None] * D + d[None, :], mask=mask & is_owned[:, None], other=0.0)
            higher = tl.maximum(top, lse)
            keep, weight = tl.exp(top - higher), tl.exp(lse - higher)
            out = out * keep[:, None] + part * weight[:, None]
            total = total * keep + weight
            top = higher
        out = out / total[:, None]
        tl.store(result + to[:, None] * D + d[None, :], out.to(result.dtype.element_ty), mask=mask)
    else:
        is_empty = total == 0.0
        lse = tl.where(is_empty, float("-inf"), top + tl.log(tl.where(is_empty, 1.0, total)))
        out = out / tl.where(is_empty, 1.0, total)[:, None]
        to += (first_split + split) * a_split
        tl.store(lses + to, lse, mask=is_query)
        tl.store(outs + to[:, None] * D + d[None, :], out, mask=mask)


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


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    suffix: Tensor,
    suffix_bias: Tensor | None,
    shared: Tensor,
    shared_bias: Tensor | None,
    spans: Spans,
    scale: float,
    softcap: float | None = None,
    *,
    sinks: Tensor | None = None,
    rotation: Rotation | None = None,
    splits: tuple[int, int] | None = None,
) -> Tensor:
    """[R, Hq, D] attention of one query a row over its prompt's keys and its own, in the precision of `query` [R, Hq, D].

    Writes `key` and `value` [R, Hkv, D] into the step column of `suffix` [2, rows, Hkv, C, D]; `shared` [2, P, Hkv, K, D]
    holds the prompts' keys and values. Biases [rows, C] and [rows, K], the latter of the prompts' keys as each row sees them, are
    added to the scores. `sinks` [Hq] are scores of a further key without value. With `rotation`, `query` and
    `key` are those of the projection. `splits` fixes the numbers of splits of the prompt's and the own keys.
    Two launches, three where rows are too few to fill the device without splitting their own keys.
    """
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    rows, heads, width = query.shape
    key_heads, repeats = suffix.shape[2], heads // suffix.shape[2]
    prompts, group = spans.members.shape if shared.shape[3] else (0, 1)
    if splits is None:
        enough = programs_of(query.device)
        tiles = triton.cdiv(group * repeats, _queries(group * repeats, query))
        splits = (
            pieces(shared.shape[3], prompts * key_heads * tiles, enough),
            pieces(suffix.shape[3], rows * key_heads, enough),
        )
    of_shared, of_suffix = splits[0] if prompts else 0, splits[1]
    merges = of_suffix == 1
    parts = of_shared + (0 if merges else of_suffix)
    outs = torch.empty(parts, rows, heads, width, dtype=torch.float32, device=query.device)
    lses = torch.empty(parts, rows, heads, dtype=torch.float32, device=query.device)
    result = torch.empty(rows, heads, width, dtype=query.dtype, device=query.device)
    call = _Call(query, key, value, spans, rotation, outs, lses, result, scale, softcap, sinks)
    if of_shared:
        call.launch(shared, shared_bias, spans.lengths, (0, of_shared), group=group)
    call.launch(suffix, suffix_bias, spans.step_column, (of_shared, of_suffix), merges=merges)
    if merges:
        return result
    # fmt: off
    _merge[(rows, heads)](
        outs, lses, spans.owned, result, of_shared, parts, width,
        BLOCK_S=triton.next_power_of_2(parts), BLOCK_D=triton.next_power_of_2(width),
    )
    # fmt: on
    return result


@dataclass(frozen=True, eq=False)
class _Call:
    """Arguments that both parts share."""

    query: Tensor
    key: Tensor
    value: Tensor
    spans: Spans
    rotation: Rotation | None
    outs: Tensor
    lses: Tensor
    result: Tensor
    scale: float
    softcap: float | None
    sinks: Tensor | None

    def launch(
        self,
        buffer: Tensor,
        bias: Tensor | None,
        stop: Tensor,
        splits: tuple[int, int],
        *,
        group: int | None = None,
        merges: bool = False,
    ) -> None:
        """The prompts' part with at most `group` rows each, or every row's own. `splits`: (first, count)."""
        query, key, value, spans = self.query, self.key, self.value, self.spans
        rows, heads, width = query.shape
        is_shared, repeats = group is not None, heads // buffer.shape[2]
        queries = (group or 1) * repeats
        block_q = _queries(queries, query)
        parts = len(spans.members) if is_shared else rows
        turn = self.rotation
        nothing = self.result  # a pointer that is not read
        tables = (turn.cosines, turn.sines, turn.positions) if turn else (nothing, nothing, nothing)
        norms = (turn.query_norm, turn.key_norm) if turn and turn.query_norm is not None else (nothing, nothing)
        # fmt: off
        _part[(parts, buffer.shape[2], triton.cdiv(queries, block_q) * splits[1])](
            query, key, value, buffer[0], buffer[1], nothing if bias is None else bias, spans.members, spans.counts,
            spans.first, stop, spans.owned, *tables, *norms,
            nothing if self.sinks is None else self.sinks, self.outs, self.lses, self.result,
            self.scale, 1.0 if self.softcap is None else self.softcap, turn.epsilon if turn else 0.0,
            repeats, group or 1, splits[1], query.stride(0), query.stride(1), key.stride(0), key.stride(1),
            value.stride(0), value.stride(1), buffer.stride(1), buffer.stride(2),
            0 if bias is None else bias.stride(0), int(is_shared), splits[0], rows,
            D=width, IS_SHARED=is_shared, MERGES=merges, HAS_BIAS=bias is not None, HAS_SOFTCAP=self.softcap is not None,
            HAS_SINKS=self.sinks is not None,
            ROTATES=turn is not None, HAS_NORM=turn is not None and turn.query_norm is not None,
            ROUNDS=turn is not None and turn.rounds, WIDEN=query.dtype == torch.bfloat16 and is_interpreted(),
            BLOCK_D=max(16, triton.next_power_of_2(width)), BLOCK_Q=block_q, BLOCK_K=BLOCK_KEYS // _halves(query) // (1 if width <= 64 else 2),
            num_warps=4 if block_q * width <= 4096 else 8,  # with four, registers of 64 queries of 128 are spilled
        )
        # fmt: on


def _queries(count: int, query: Tensor) -> int:
    """Query rows of a program's tile for a part with this many queries."""
    return max(16, min(MAX_QUERIES // _halves(query), int(triton.next_power_of_2(count))))


def _halves(query: Tensor) -> int:
    """Divisor of block sizes: 2 in float32, which takes twice the shared memory, else 1."""
    return 2 if query.dtype == torch.float32 else 1


def is_interpreted() -> bool:
    """True in Triton's interpreter on a CPU, whose dot products lack bfloat16 and use float32."""
    return bool(triton.knobs.runtime.interpret)


def pieces(keys: int, programs: int, enough: int) -> int:
    """Number of splits of a part with at most `keys` keys, given `programs` programs without splitting.

    One where these fill more than half of the device: a split part takes a launch more.
    """
    return max(1, min(keys // SPLIT_KEYS, enough // max(programs, 1)))


def programs_of(device: torch.device) -> int:
    """Number of programs that fill this device: four per multiprocessor."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
