"""Attention of packed rows `[prompt | c1 | ... | cG]` by FlexAttention: one kernel, no copy of a prompt, no padding, on CUDA.

A token sees itself and those before it in its own part, and, in a completion, the whole prompt. Blocks of 128 x 128 that no
token sees are skipped, and blocks that all see run without mask (Dong et al. 2024, FlexAttention).
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from covey.kernels.attention_product import AttentionProduct, Layout
from covey.kernels.compile import keep_compiled_code
from covey.kernels.matmul import padded_rows
from covey.kernels.shared_attention import SharedAttention, runs_here
from covey.kernels.trials import outcome, relative_gap
from covey.kernels.windows import Window
from covey.models import autocast_dtype
from covey.process.device import onto

MIN_PADDED = 128
"""Length from which a row on a CPU is padded to one of few lengths, by at most an eighth."""


class SharedPromptAttention:
    """One of the kernels "own" (a CPU), "flex" (FlexAttention, CUDA) or "sdpa" (PyTorch's, part by part, by the caller)."""

    @staticmethod
    def flex_unavailable_reason(heads: AttentionHeads) -> str | None:
        """Reason why FlexAttention cannot compute such layers here; None after a trial that agreed with SDPA."""
        return reason_against(heads)

    @staticmethod
    def padding(tokens: int, kernel: str, device: torch.device) -> int:
        """Tokens to append to a row of `tokens`: up to whole blocks for "flex", to one of few lengths for "own" on a CPU."""
        if kernel == "flex":
            return padded(tokens) - tokens
        is_padded = kernel == "own" and device.type == "cpu" and tokens >= MIN_PADDED
        return padded_rows(tokens) - tokens if is_padded else 0

    @staticmethod
    def mask(layouts: Sequence[Layout], kernel: str, device: torch.device, window: Window | None = None) -> Any:
        """FlexAttention's block mask of a layer with this window; None for the other kernels."""
        return mask_of(layouts, device, window) if kernel == "flex" else None

    @staticmethod
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layouts: Sequence[Layout],
        mask: Any,
        *,
        kernel: str,
        product: AttentionProduct,
    ) -> Tensor | None:
        """[1, S, H, D] from `query` [1, H, S, D], `key` and `value` [1, K, S, D]; None where `product` must compute it by part."""
        if kernel == "flex" and product.dropout == 0.0 and product.softcap is None:
            return attend(query, key, value, mask, product.scale, product.sinks)
        if kernel != "own" or not product.is_plain or not runs_here(query, value, product.dropout):
            return None
        scale = query.shape[-1] ** -0.5 if product.scale is None else product.scale
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
        out: Tensor = SharedAttention.apply(*(x[0].to(dtype) for x in (query, key, value)), tuple(layouts), scale)
        return out.transpose(0, 1)[None]


logger = logging.getLogger(__name__)

BLOCK = 128
"""Tokens per block, the size that the kernels are tuned for."""

FEWEST = 2 * BLOCK
"""Tokens of the shortest row: fewer than 128 queries compile another kernel, and a single block is a special case."""


@dataclass(frozen=True)
class AttentionHeads:
    """Shape, dtype and device that FlexAttention compiles for; layers of one model may differ."""

    query: int
    key: int
    width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device
    has_sinks: bool = False
    scale: float | None = None

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor, scale: float | None, has_sinks: bool) -> AttentionHeads:
        """Of the arguments of `attend`."""
        shape = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
        dtype = autocast_dtype(query.device.type) or query.dtype
        return AttentionHeads(*shape, dtype, query.device, has_sinks, _unless_usual(scale, query.shape[3]))


def padded(tokens: int) -> int:
    """Tokens of a row padded to whole blocks."""
    return max(FEWEST, -(-tokens // BLOCK) * BLOCK)


@dataclass(frozen=True, eq=False)
class _KeyRanges:
    """Key ranges of each of S tokens: from `part_start` to itself, and of its prompt from `first` to before `last`."""

    part_start: Tensor
    first: Tensor
    last: Tensor

    @staticmethod
    def of(layouts: Sequence[Layout], window: Window | None = None) -> _KeyRanges:
        """Key ranges of adjacent parts, on the CPU. `window` moves the first keys towards the token."""
        part_starts, first, last, counts = [], [], [], []
        for layout in layouts:
            begin = layout.start
            for part, count in enumerate((layout.length, *layout.counts)):
                span = (layout.start, layout.start + layout.length) if part else (0, 0)
                part_starts.append(begin)
                first.append(span[0])
                last.append(span[1])
                counts.append(count)
                begin += count
        wide = lambda values: torch.repeat_interleave(torch.tensor(values), torch.tensor(counts))
        seen = _KeyRanges(wide(part_starts), wide(first), wide(last))
        return seen if window is None else seen._within(window)

    def _within(self, window: Window) -> _KeyRanges:
        place = torch.arange(len(self.part_start))
        length = self.last - self.first  # length of the prompt before a token; 0 for the prompt's own tokens
        earliest = window.first(length + place - self.part_start)  # a position, counted from the prompt's first token
        part_start = torch.maximum(self.part_start, self.part_start + earliest - length)
        return _KeyRanges(part_start, torch.minimum(self.first + earliest.clamp(min=0), self.last), self.last)

    def to(self, device: torch.device) -> _KeyRanges:
        move = lambda x: onto(device, x.int())
        return _KeyRanges(move(self.part_start), move(self.first), move(self.last))

    def allows(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """FlexAttention's mask: (batch, head, query, key) -> bool."""
        part_start, first, last = self.part_start, self.first, self.last

        def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            in_prompt = (key >= first[query]) & (key < last[query])
            return in_prompt | ((key >= part_start[query]) & (key <= query))

        return mask


def mask_of(layouts: Sequence[Layout], device: torch.device, window: Window | None = None) -> BlockMask:
    """Block mask of a packed row whose length is a multiple of `BLOCK`, from its parts: no [S, S] tensor is built."""
    seen = _KeyRanges.of(layouts, window)
    size = seen.part_start.shape[0]
    assert size % BLOCK == 0
    place = torch.arange(size)
    spans = ((seen.part_start, place + 1), (seen.first, seen.last))
    touched, whole = (_blocks(place, spans, is_whole) for is_whole in (False, True))
    is_full = whole == BLOCK
    of_queries = (touched > 0) & ~is_full, is_full
    of_keys = (blocks.T.contiguous() for blocks in of_queries)  # torch's `from_kv_blocks` makes these on the device
    kv, full_kv, q, full_q = (_ordered(blocks, device) for blocks in (*of_queries, *of_keys))
    return BlockMask((size, size), *kv, *full_kv, *q, *full_q, (BLOCK, BLOCK), seen.to(device).allows())


def _blocks(place: Tensor, spans: Sequence[tuple[Tensor, Tensor]], is_whole: bool) -> Tensor:
    """[blocks, blocks] counts of tokens in each query block that see some key of a key block (`is_whole`: every key).

    A token counts once for each span of keys (first, end); spans do not overlap.
    """
    count = place.shape[0] // BLOCK
    steps = torch.zeros(count * (count + 1), dtype=torch.long)
    for start, stop in spans:
        begin = (start + BLOCK - 1 if is_whole else start) // BLOCK
        end = stop // BLOCK if is_whole else (stop + BLOCK - 1) // BLOCK
        end = torch.where(stop > start, torch.maximum(end, begin), begin)
        for edge, change in ((begin, 1), (end, -1)):
            steps += change * torch.bincount(place // BLOCK * (count + 1) + edge, minlength=len(steps))
    return steps.view(count, count + 1).cumsum(1)[:, :count]


def _ordered(blocks: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """[1, 1, n] counts and [1, 1, n, n] block indices, selected blocks first, in FlexAttention's format."""
    order = torch.argsort(blocks.int(), dim=1, descending=True, stable=True)
    return onto(device, blocks.sum(1).int())[None, None], onto(device, order.int())[None, None]


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None, sinks: Tensor | None = None
) -> Tensor:
    """[1, H, S, D], [1, K, S, D], [1, K, S, E] -> [1, S, H, E]; K divides H; `sinks` are [H]. Compiled on CUDA."""
    device = query.device.type
    dtype = autocast_dtype(device) or query.dtype
    is_compiled = _compiles_on(device)
    run: Any = _compiled() if is_compiled else _attention
    inputs = [x.to(dtype) for x in (query, key, value)]
    is_scored = is_compiled and not torch.is_grad_enabled()
    if is_scored:  # by the kernel that training compiles: one without gradients would be compiled apart
        inputs, sinks = [x.detach().requires_grad_() for x in inputs], None if sinks is None else sinks.detach()
    with torch.autocast(device, enabled=False), torch.set_grad_enabled(is_scored or torch.is_grad_enabled()):
        out: Tensor = run(
            *inputs, sinks, block_mask=mask, scale=_unless_usual(scale, query.shape[-1]),
            enable_gqa=query.shape[1] != key.shape[1], kernel_options=_options(dtype, query.shape[-1]),
        )  # fmt: skip
    return (out.detach() if is_scored else out).transpose(1, 2)


def _compiles_on(device: str) -> bool:
    """True on CUDA, but in a dispatch mode: see `compiled` of `fused_layers.py`."""
    return device == "cuda" and not is_in_torch_dispatch_mode(include_infra_modes=False)


def _unless_usual(scale: float | None, width: int) -> float | None:
    """None for the scale that FlexAttention takes without one, up to rounding: each number is compiled apart."""
    return None if scale is not None and math.isclose(scale, width**-0.5, rel_tol=1e-12) else scale


def _attention(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, **options: Any) -> Any:
    """FlexAttention, and with sinks: a logit a head that takes part in the softmax and has no value."""
    if sinks is None:
        return flex_attention(query, key, value, **options)
    out, aux = flex_attention(query, key, value, return_aux=AuxRequest(lse=True), **options)
    return (out * torch.sigmoid(aux.lse - sinks[:, None])[..., None]).to(out.dtype)


def _options(dtype: torch.dtype, width: int) -> dict[str, Any] | None:
    """Options of the kernel where torch's are slow: scores of 128 x 128 for 16-bit heads of 64 take eight warps (H100: 0.36 ms, not 0.83).

    Keys repeated for each query head balance the backward (1.33 ms, not 1.93), but cost the forward (0.50 ms) and copies as much.
    """
    return {"fwd_num_warps": 8} if dtype.itemsize == 2 and width == 64 else None


@lru_cache
def _compiled() -> Any:
    """FlexAttention compiled once for all lengths, which differ in every micro-batch."""
    keep_compiled_code()
    return torch.compile(_attention, dynamic=True)


def reason_against(heads: AttentionHeads) -> str | None:
    """Reason against FlexAttention for layers of this shape; None after a trial that agreed, forward and backward."""
    if heads.device.type != "cuda":
        return f"it is compiled for CUDA, and the model is on {heads.device.type}"
    if importlib.util.find_spec("triton") is None:
        return "its compiler, Triton, is not installed"
    capability = torch.cuda.get_device_capability(heads.device)
    if capability < (8, 0):
        return f"it needs compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"
    return tried(heads)


@lru_cache
def tried(heads: AttentionHeads) -> str | None:
    """Trial of forward and backward at two lengths against explicit attention: None, or the reason of its failure."""
    # seven blocks first: two equal sizes, such as blocks and heads, are compiled as one
    for layout in (Layout(0, 300, (1, 0, 200, 290)), Layout(0, 40, (150, 30))):
        gap = outcome(partial(_gap, heads, layout))
        if isinstance(gap, str):
            return f"it does not compile or run here {gap}"
        most = {torch.float64: 1e-9, torch.float32: 1e-2}.get(heads.dtype, 3e-2)  # float32 products may be TF32's
        if not gap < most:
            return f"its values differ from explicit attention's by {gap:.1g}"
    return None


def _gap(heads: AttentionHeads, layout: Layout) -> float:
    """Largest relative difference to PyTorch's operations of the output and the gradients, on random inputs."""
    tokens = layout.length + sum(layout.counts)
    size = padded(tokens)
    layouts = (layout, Layout(tokens, size - tokens, ()))
    draw = torch.Generator().manual_seed(0)
    draws = lambda count, width: torch.randn(1, size, count, width, generator=draw).to(heads.device, heads.dtype)
    make = lambda count, width: draws(count, width).transpose(1, 2)  # as layers pass them: other strides compile again
    leaves = [make(heads.query, heads.width), make(heads.key, heads.width), make(heads.key, heads.value_width)]
    sign = make(heads.query, heads.value_width).transpose(1, 2)
    if heads.has_sinks:
        leaves.append(torch.randn(heads.query, generator=draw).to(heads.device))
    place = torch.arange(size, device=heads.device)
    seen = _KeyRanges.of(layouts).to(heads.device).allows()(place, place, place[:, None], place[None])

    def by_flex(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        return attend(query, key, value, mask_of(layouts, heads.device), heads.scale, sinks)

    def by_product(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        return AttentionProduct(heads.scale, 0.0, None, sinks)(query, key, value, seen).transpose(1, 2)

    results = []
    with torch.enable_grad(), torch.autocast(heads.device.type, enabled=False):
        for run in (by_flex, by_product):
            inputs = [leaf.detach().requires_grad_() for leaf in leaves]
            out = run(*inputs)
            results.append([out.detach(), *torch.autograd.grad((out * sign).sum(), inputs)])
    return relative_gap(*results)
