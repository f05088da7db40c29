"""malloc settings for training on a CPU, and tensors outside the heap."""

import ctypes
import functools
import math
import mmap
import sys
from collections.abc import Sequence

import torch

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of <malloc.h>."""


def training_heap(*, returns_blocks: bool) -> None:
    """Set glibc's malloc for a learner on a CPU; without glibc, nothing. `mallopt` cannot be undone: it holds for the process.

    `returns_blocks`: those of 1 MiB and more go back to the OS at once. With recomputed activations or adapters, small blocks
    between them would pin the heap, which grew to twice the memory in use (725 against 398 MiB at 10 million parameters
    recomputed, 767 against 419 with LoRA). This costs 5% to 9% of a step.

    Otherwise up to 256 MiB of free memory at the end of the heap are kept for the next step: by default glibc would fault 40,000
    pages in again in every step, 5% of its time. Blocks of 32 MiB and more are returned at once, as by default.
    """
    library = _glibc()
    if library is None:
        return
    library.mallopt(_MMAP_THRESHOLD, 2**20 if returns_blocks else 32 * 2**20)
    library.mallopt(_TRIM_THRESHOLD, 2**17 if returns_blocks else 256 * 2**20)  # 2**17 is glibc's default
    if returns_blocks:
        library.malloc_trim(0)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU in separately mapped pages, which are returned to the OS with the tensor.

    On the heap, growing buffers would cause fragmentation. Raises MemoryError if memory runs out.
    """
    size = math.prod(shape)
    if not size or not sys.platform.startswith("linux"):
        return torch.zeros(*shape, dtype=dtype)
    try:
        pages = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot allocate memory for {size * dtype.itemsize} bytes: {error}") from error
    return torch.frombuffer(pages, dtype=dtype).view(*shape)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """The C library; None if it is not glibc."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None
