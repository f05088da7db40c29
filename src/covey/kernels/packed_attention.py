"""Attention of packed rows on a CPU, forward and backward (`cpp/packed_attention.cpp`)."""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.kernels.attention_product import Layout
from covey.kernels.compile import NUMBERS, has_amx, is_fake, largest_gap, load_verified

SOURCE = Path(__file__).parent / "cpp" / "packed_attention.cpp"
MOST_NUMBERS = 2**20
"""Most elements of a key sequence of one head; each thread needs up to six times as many float32 of scratch space."""
LONG = 512
"""Number of keys from which PyTorch's operations are faster on a processor with AMX."""


class Heads(ctypes.Structure):
    """Address and strides of a tensor of three dimensions, contiguous in its last; the same layout as in the C++ sources."""

    _fields_ = (("data", ctypes.c_void_p), ("by_first", ctypes.c_int64), ("by_second", ctypes.c_int64))

    @classmethod
    def of(cls, x: Tensor) -> Any:
        """Reference for a C function to `x` [H, S, D] or [R, H, D]."""
        return ctypes.byref(cls(x.data_ptr(), x.stride(0), x.stride(1)))


class _Packed(ctypes.Structure):
    """Positions of prompts and completions; the same layout as in packed_attention.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("segments", "heads", "repeats", "width", "tokens", "most", "threads")
        ),
        *((name, ctypes.c_void_p) for name in ("starts", "lengths", "firsts", "counts", "scratch")),
        ("scale", ctypes.c_double),
    )  # fmt: skip
    held: tuple[Any, ...]
    """References that keep the arrays behind its addresses alive."""
    space: Tensor
    """Scratch space of the threads."""


class PackedAttention:
    """Attention kernels for packed rows in one dtype; one call computes a whole row."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._scratch_size = library.covey_shared_scratch
        self._scratch_size.argtypes, self._scratch_size.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
        self._forward, self._backward = library.covey_shared_forward, library.covey_shared_backward
        self._forward.argtypes, self._backward.argtypes = [ctypes.c_void_p] * 6, [ctypes.c_void_p] * 10
        self._forward.restype = self._backward.restype = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, layouts: Sequence[Layout], scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [H, S, D], tokens outermost in memory, and log-sum-exp [H, S] float32 of the scores."""
        out = empty_like(query)
        normalizer = torch.empty(query.shape[:2], dtype=torch.float32)
        query, key, value = map(_in_rows, (query, key, value))
        self._forward(
            ctypes.byref(self._with_scratch(_packed(layouts, query, key, scale), False)),
            *map(Heads.of, (query, key, value, out)),
            normalizer.data_ptr(),
        )
        return out, normalizer

    def backward(
        self, gradient: Tensor, saved: Sequence[Tensor], layouts: Sequence[Layout], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value. `saved`: those three, the output and the log-sum-exp of `forward`."""
        *inputs, normalizer = saved
        gradient, query, key, value, out = map(_in_rows, (gradient, *inputs))
        gradients = empty_like(query), empty_like(key), empty_like(value)
        self._backward(
            ctypes.byref(self._with_scratch(_packed(layouts, query, key, scale), True)),
            *map(Heads.of, (gradient, query, key, value, out)),
            normalizer.data_ptr(),
            *map(Heads.of, gradients),
        )
        return gradients

    def _with_scratch(self, packed: _Packed, is_backward: bool) -> _Packed:
        """Add scratch space from torch's allocator, so that running out of memory raises as usual."""
        packed.space = torch.zeros(
            packed.threads, self._scratch_size(ctypes.byref(packed), is_backward), dtype=torch.float32
        )
        packed.scratch = packed.space.data_ptr()
        return packed


def empty_like(x: Tensor) -> Tensor:
    """[H, S, D], tokens outermost in memory: the layout in which the model's projections read and write."""
    return x.new_empty(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1)


def _in_rows(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _packed(layouts: Sequence[Layout], query: Tensor, key: Tensor, scale: float) -> _Packed:
    arrays = _arrays(tuple(layouts))
    packed = _Packed(
        len(layouts), key.shape[0], query.shape[0] // key.shape[0], query.shape[2], query.shape[1], _most(layouts),
        torch.get_num_threads(), *map(ctypes.addressof, arrays), None, scale,
    )  # fmt: skip
    packed.held = arrays
    return packed


@functools.lru_cache(maxsize=4)
def _arrays(layouts: tuple[Layout, ...]) -> tuple[Any, ...]:
    """Starts, lengths, first completions and counts."""
    firsts = [0]
    for layout in layouts:
        firsts.append(firsts[-1] + len(layout.counts))
    return tuple(
        (ctypes.c_int64 * max(1, len(values)))(*values)
        for values in (
            [layout.start for layout in layouts],
            [layout.length for layout in layouts],
            firsts,
            [count for layout in layouts for count in layout.counts],
        )
    )


def _most(layouts: Sequence[Layout]) -> int:
    return max(layout.length + max(layout.counts, default=0) for layout in layouts)


def packed_attention_for(query: Tensor, key: Tensor, layouts: Sequence[Layout]) -> PackedAttention | None:
    """The kernels for `query` [H, S, D] and `key` [K, S, D]; None if PyTorch's operations are used.

    They are used for other dtypes and widths, too many keys for the scratch space, long keys on AMX, and fewer tasks (prompts
    times key heads) than threads.
    """
    width, most = query.shape[2], _most(layouts)
    if query.dtype not in NUMBERS or width % 16 or most * width > MOST_NUMBERS or is_fake(query):
        return None
    if len(layouts) * key.shape[0] < torch.get_num_threads():
        return None
    if query.dtype == torch.bfloat16 and most >= LONG and has_amx():
        return None
    return _verified(query.dtype)


@functools.cache
def _verified(dtype: torch.dtype) -> PackedAttention | None:
    """The kernels for one dtype, if they compile and agree with plain attention, forward and backward; else None."""
    most = 1e-4 if dtype == torch.float32 else 5e-2
    gap = lambda kernels: _gap(kernels, dtype)
    return load_verified(
        SOURCE, (f"NUMBER={NUMBERS[dtype]}",), "Attending", PackedAttention, gap, most, "attention differs"
    )


def _gap(kernels: PackedAttention, dtype: torch.dtype) -> float:
    """The largest difference to plain attention in float32, of outputs and gradients, on a prompt with two completions."""
    layout = Layout(0, 20, (3, 30))
    generator = torch.Generator().manual_seed(0)
    query, key, value, gradient = (
        torch.randn(heads, 53, 16, generator=generator).to(dtype).float() for heads in (2, 1, 1, 2)
    )
    positions = torch.arange(53)
    owners = torch.tensor([0] * 20 + [1] * 3 + [2] * 30)
    sees = (owners == owners[:, None]) & (positions <= positions[:, None]) | (owners == 0) & (owners[:, None] != 0)
    scores = (query @ key.mT * 0.25).masked_fill(~sees, float("-inf"))
    weights = scores.softmax(-1)
    # without autograd: this may run inside a forward pass whose hooks count saved tensors
    slopes = gradient @ value.mT
    slopes = weights * (slopes - (weights * slopes).sum(-1, keepdim=True)) * 0.25
    summed = lambda x: x.sum(0, keepdim=True)
    expected = [weights @ value, slopes @ key, summed(slopes.mT @ query), summed(weights.mT @ gradient)]
    query, key, value, gradient = (x.to(dtype) for x in (query, key, value, gradient))
    out, normalizer = kernels.forward(query, key, value, [layout], 0.25)
    results = [out, *kernels.backward(gradient, (query, key, value, out, normalizer), [layout], 0.25)]
    return largest_gap(results, expected)
