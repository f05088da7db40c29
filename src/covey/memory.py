"""Running out of memory, recognised and survived: the same work again in smaller pieces."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc")
"""What allocators say: CUDA's and torch's on a CPU, the C library's, C++'s."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in said for sign in _SIGNS)


def release() -> None:
    """Give back what the failed attempt held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def until_it_fits(work: Callable[[], T], shrink: Callable[[str], None]) -> T:
    """`work()`, tried again after `shrink(what was said)` each time that memory runs out.

    `shrink` undoes what the attempt left and makes the pieces smaller, or raises when they cannot be smaller. Whatever
    else goes wrong in `work` is raised as it is.
    """
    while True:
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            said = (str(error).splitlines() or [type(error).__name__])[0]
        release()  # only now: the error's traceback kept the tensors of the attempt alive
        shrink(said)


def give_back_large_blocks() -> None:
    """Let the C library return blocks of 1 MiB and more to the system at once, where it is glibc.

    It would keep them in its heap, where small blocks in between pin them: with recomputed activations the heap grew to
    twice what was in use (725 against 398 MiB at 10 million parameters). It costs about 5% of a step's time.
    """
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_MMAP_THRESHOLD, 2**20)


_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of <malloc.h>."""
