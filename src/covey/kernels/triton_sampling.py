"""From logits to tokens on a GPU: Triton kernels that read the logits once, in the precision in which they were computed.

One program a block of the vocabulary leaves the block's largest score, its weight and its part of the entropy; one program
a row inverts the cumulative weight (inverse transform sampling): the block first, then the token in it. A row's result
depends on its own logits and uniform alone, so a completion does not change with its batch. `sampling.draw` computes the
same with PyTorch's operations; the two differ by the rounding of sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Tokens of a program of the first pass."""
CANDIDATES = 8
"""Thresholds that one pass of the search for top-k or top-p compares with; a power of two."""
PASSES = 12
"""Passes of the search: 2**32 keys, divided by nine each time, come down to one."""
SEARCH_BLOCK = 1024
"""Tokens that the search holds at a time, each compared with all candidates."""


@triton.jit
def _scores(logits, seen, row, at, inside, row_stride, seen_stride, temperature, penalty, HAS_SEEN: tl.constexpr):
    """Float32 scores of the tokens `at` of a row: penalty, then temperature; -inf outside of the vocabulary."""
    x = tl.load(logits + row * row_stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_SEEN:
        was = tl.load(seen + row * seen_stride + at, mask=inside, other=0) != 0
        x = tl.where(was, tl.where(x > 0, x / penalty, x * penalty), x)
    return x / temperature


@triton.jit
def _ordered(x):
    """Int32 keys in the order of the float32 numbers `x`."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


# fmt: off
@triton.jit
def _largest_key(
    logits, seen, row, V, row_stride, seen_stride, temperature, penalty, least, top, goal,
    HAS_SEEN: tl.constexpr, BY_WEIGHT: tl.constexpr, N: tl.constexpr, PASSES: tl.constexpr, BLOCK_V: tl.constexpr,
):
    # fmt: on
    """The largest key whose tokens and those above it have mass `goal`: counted, or weighted by `exp(score - top)`.

    Keys below `least` have no mass. Each pass divides the interval of keys by N + 1.
    """
    low = _ordered(tl.full([], float("-inf"), tl.float32)).to(tl.int64)  # has the mass
    high = _ordered(top).to(tl.int64) + 1  # has none
    n = tl.arange(0, N)
    for _ in range(PASSES):
        candidates = (low + (high - low) * (n + 1) // (N + 1)).to(tl.int32)
        mass = tl.zeros([N], tl.float32)
        for start in range(0, V, BLOCK_V):
            at = start + tl.arange(0, BLOCK_V)
            x = _scores(logits, seen, row, at, at < V, row_stride, seen_stride, temperature, penalty, HAS_SEEN)
            key = _ordered(x)
            counts = (at < V) & (key >= least)
            weight = tl.where(counts, tl.exp(x - top) if BY_WEIGHT else 1.0, 0.0)
            mass += tl.sum(tl.where(key[:, None] >= candidates[None, :], weight[:, None], 0.0), 0)
        reached = candidates.to(tl.int64)
        low = tl.maximum(low, tl.max(tl.where(mass >= goal, reached, low), 0))
        high = tl.minimum(high, tl.min(tl.where(mass >= goal, high, tl.maximum(reached, low + 1)), 0))
    return low.to(tl.int32)


# fmt: off
@triton.jit(do_not_specialize=["top_k"])
def _threshold(
    logits, seen, thresholds, V, row_stride, seen_stride, temperature, penalty, top_k, top_p, log_min_p,
    HAS_SEEN: tl.constexpr, HAS_K: tl.constexpr, HAS_P: tl.constexpr, N: tl.constexpr, PASSES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # fmt: on
    """The lowest score of a row that top-k, then top-p, and min-p keep; equal scores stay or go together."""
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK_V):
        at = start + tl.arange(0, BLOCK_V)
        x = _scores(logits, seen, row, at, at < V, row_stride, seen_stride, temperature, penalty, HAS_SEEN)
        best = tl.maximum(best, x)
    top = tl.max(best, 0)
    least = _ordered(tl.full([], float("-inf"), tl.float32))
    if HAS_K:
        goal = top_k.to(tl.float32)
        # fmt: off
        least = _largest_key(logits, seen, row, V, row_stride, seen_stride, temperature, penalty, least, top, goal,
                             HAS_SEEN, False, N, PASSES, BLOCK_V)
        # fmt: on
    if HAS_P:
        total = tl.zeros([BLOCK_V], tl.float32)
        for start in range(0, V, BLOCK_V):
            at = start + tl.arange(0, BLOCK_V)
            x = _scores(logits, seen, row, at, at < V, row_stride, seen_stride, temperature, penalty, HAS_SEEN)
            total += tl.where((at < V) & (_ordered(x) >= least), tl.exp(x - top), 0.0)
        # a hair less than the share: sums of another order must not fall short of it for ever
        goal = tl.sum(total, 0) * top_p * (1 - 1e-6)
        # fmt: off
        least = _largest_key(logits, seen, row, V, row_stride, seen_stride, temperature, penalty, least, top, goal,
                             HAS_SEEN, True, N, PASSES, BLOCK_V)
        # fmt: on
    score = (least ^ ((least >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(thresholds + row, tl.maximum(score, top + log_min_p))


# fmt: off
@triton.jit
def _scan(
    logits, seen, thresholds, tops, totals, V, row_stride, seen_stride, temperature, penalty,
    HAS_SEEN: tl.constexpr, HAS_THRESHOLD: tl.constexpr, BLOCK_V: tl.constexpr,
):
    # fmt: on
    """Largest score of a block, and sum of the weights relative to it."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK_V + tl.arange(0, BLOCK_V)
    x = _scores(logits, seen, row, at, at < V, row_stride, seen_stride, temperature, penalty, HAS_SEEN)
    if HAS_THRESHOLD:
        x = tl.where(x < tl.load(thresholds + row), float("-inf"), x)
    top = tl.max(x, 0)
    weight = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
    to = row * tl.num_programs(1) + block
    tl.store(tops + to, top)
    tl.store(totals + to, tl.sum(weight, 0))


@dataclass(frozen=True, eq=False)
class RowState:
    """Tables of the running rows, which the draw of a decode step reads and advances."""

    token: Tensor
    """[R] int64, next input token."""
    position: Tensor
    """[R] int64, its position."""
    written: Tensor
    """[R] int64, tokens of the completion so far."""
    limit: Tensor
    """[R] int64, most tokens of the completion."""
    output_row: Tensor
    """[R] int64, the row's place in the tables of results."""
    live: Tensor
    """[R] bool, False for a row that has ended."""
    stopped: Tensor
    """[R] bool, ended by a token of `is_eos`."""
    first: Tensor
    """[R] int32, first column of the row's keys; `never` once it has ended."""
    is_eos: Tensor
    """[V] bool"""
    tokens: Tensor
    """[outputs + 1, T] int64; the last row takes the tokens of rows that have ended."""
    logprobs: Tensor
    """[outputs + 1, T] float32"""
    uniforms: Tensor
    """[outputs + 1, T], the uniform of each token."""
    never: int
    ends: bool
    """True: rows end here, by `is_eos` or their limit; False: the host decides."""


# fmt: off
@triton.jit
def _advance(row, token, logprob, is_live, count, place, next_token, position, written, limit, live, stopped, first,
             is_eos, tokens, logprobs, never, ENDS: tl.constexpr):
    # fmt: on
    """Store a row's token and log-probability, and advance its tables."""
    tl.store(tokens + place, token)
    tl.store(logprobs + place, logprob)
    tl.store(next_token + row, token)
    more = is_live.to(tl.int64)
    tl.store(position + row, tl.load(position + row) + more)
    length = tl.load(written + row) + more
    tl.store(written + row, length)
    has_stopped = (tl.load(stopped + row) != 0) | ((tl.load(is_eos + token) != 0) & is_live)
    tl.store(stopped + row, has_stopped.to(tl.uint8))
    if ENDS:
        goes_on = is_live & (has_stopped == 0) & (length < tl.load(limit + row))
        tl.store(live + row, goes_on.to(tl.uint8))
        tl.store(first + row, tl.where(goes_on, tl.load(first + row), never))


# fmt: off
@triton.jit(do_not_specialize=["no_output", "length"])
def _pick(
    logits, seen, thresholds, tops, totals, uniforms, tokens, logprobs,
    next_token, position, written, limit, output_row, live, stopped, first, is_eos, no_output, length, never,
    V, blocks, row_stride, seen_stride, temperature, penalty,
    ENDS: tl.constexpr, HAS_SEEN: tl.constexpr, HAS_THRESHOLD: tl.constexpr, IS_GREEDY: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr,
):
    # fmt: on
    """Token and log-probability of a row: its block by the summed weights, then the token in the block."""
    # house: long, because a kernel is one function
    row = tl.program_id(0).to(tl.int64)
    is_live = tl.load(live + row) != 0
    count = tl.where(is_live, tl.load(written + row), 0)
    place = tl.where(is_live, tl.load(output_row + row), no_output) * length + count
    b = tl.arange(0, BLOCK_B)
    top_of = tl.load(tops + row * blocks + b, mask=b < blocks, other=float("-inf"))
    top = tl.max(top_of, 0)
    weight_of = tl.load(totals + row * blocks + b, mask=b < blocks, other=0.0) * tl.exp(top_of - top)
    total = tl.sum(weight_of, 0)
    cumulative = tl.cumsum(weight_of.to(tl.float64), 0)
    whole = tl.max(cumulative, 0)
    if IS_GREEDY:
        block = tl.min(tl.where(top_of == top, b, BLOCK_B), 0)
        target = whole
    else:
        target = tl.minimum(tl.load(uniforms + place).to(tl.float64) * whole, whole * (1 - 1e-12))
        block = tl.sum((cumulative <= target).to(tl.int32), 0)
    block = tl.minimum(block, blocks - 1)
    at = block * BLOCK_V + tl.arange(0, BLOCK_V)
    x = _scores(logits, seen, row, at, at < V, row_stride, seen_stride, temperature, penalty, HAS_SEEN)
    if HAS_THRESHOLD:
        x = tl.where(x < tl.load(thresholds + row), float("-inf"), x)
    if IS_GREEDY:
        token = tl.min(tl.where(x == top, at, V - 1), 0)
    else:
        before = tl.max(tl.where(b < block, cumulative, 0.0), 0)
        inside = tl.cumsum(tl.exp(x - top).to(tl.float64), 0)
        goal = tl.minimum(target - before, tl.max(inside, 0) * (1 - 1e-12))
        token = block * BLOCK_V + tl.minimum(tl.sum((inside <= goal).to(tl.int32), 0), BLOCK_V - 1)
        token = tl.minimum(token, V - 1)
    score = tl.max(tl.where(at == token, x, float("-inf")), 0)
    token, logprob = token.to(tl.int64), score - top - tl.log(total)
    # fmt: off
    _advance(row, token, logprob, is_live, count, place, next_token, position, written, limit, live, stopped, first,
             is_eos, tokens, logprobs, never, ENDS)
    # fmt: on
    if HAS_SEEN:
        tl.store(seen + row * seen_stride + token, 1)


def draw_into(
    state: RowState,
    logits: Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
    seen: Tensor | None,
) -> None:
    """Draw a token a row from `logits` [R, V] with each row's next uniform, store it with its log-probability, and advance `state`.

    Two launches, one more where top-k, top-p or min-p need a threshold. `temperature` 0 takes the likeliest token, the
    first of equals, with its log-probability at temperature 1. `seen` [R, V] bool marks the tokens that `penalty` divides,
    and from now on the drawn ones.
    """
    _Scan.of(logits, temperature, top_k, top_p, min_p, penalty, seen).pick(state)


@dataclass(frozen=True, eq=False)
class _Scan:
    """Partial sums of every block of the vocabulary, and what the second pass needs again."""

    logits: Tensor
    seen: Tensor
    thresholds: Tensor
    tops: Tensor
    totals: Tensor
    scale: tuple[int, int, float, float]
    """Strides of `logits` and `seen`, temperature, penalty."""
    flags: dict[str, bool]
    block: int
    is_greedy: bool

    @staticmethod
    def of(
        logits: Tensor,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        penalty: float,
        seen: Tensor | None,
    ) -> _Scan:
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        rows, size = logits.shape
        is_greedy, has_seen = temperature == 0, seen is not None and penalty != 1.0
        block = min(BLOCK, max(16, triton.next_power_of_2(size)))
        blocks = triton.cdiv(size, block)
        new = lambda *shape: torch.empty(*shape, dtype=torch.float32, device=logits.device)
        tops, totals = new(rows, blocks), new(rows, blocks)
        marks = seen.view(torch.uint8) if seen is not None and has_seen else tops
        scale = (logits.stride(0), marks.stride(0), 1.0 if is_greedy else temperature, penalty)
        has_k = 0 < top_k < size
        has_threshold = not is_greedy and (has_k or top_p < 1 or min_p > 0)
        thresholds = new(rows) if has_threshold else tops
        # fmt: off
        if has_threshold:
            _threshold[(rows,)](
                logits, marks, thresholds, size, *scale, top_k, top_p, math.log(min_p) if min_p else -math.inf,
                HAS_SEEN=has_seen, HAS_K=has_k, HAS_P=top_p < 1, N=CANDIDATES, PASSES=PASSES,
                BLOCK_V=min(SEARCH_BLOCK, block), num_warps=8,
            )
        flags = {"HAS_SEEN": has_seen, "HAS_THRESHOLD": has_threshold}
        _scan[(rows, blocks)](logits, marks, thresholds, tops, totals, size, *scale, **flags, BLOCK_V=block)
        # fmt: on
        return _Scan(logits, marks, thresholds, tops, totals, scale, flags, block, is_greedy)

    def pick(self, state: RowState) -> None:
        """The second pass: draws, and advances the tables of `state`."""
        (rows, size), blocks = self.logits.shape, self.tops.shape[1]
        live, stopped, is_eos = (x.view(torch.uint8) for x in (state.live, state.stopped, state.is_eos))
        last = (len(state.tokens) - 1, state.tokens.shape[1], state.never)
        # fmt: off
        _pick[(rows,)](
            self.logits, self.seen, self.thresholds, self.tops, self.totals, state.uniforms, state.tokens, state.logprobs,
            state.token, state.position, state.written, state.limit, state.output_row, live, stopped, state.first, is_eos, *last,
            size, blocks, *self.scale, ENDS=state.ends, IS_GREEDY=self.is_greedy, **self.flags,
            BLOCK_V=self.block, BLOCK_B=triton.next_power_of_2(blocks),
        )
        # fmt: on
