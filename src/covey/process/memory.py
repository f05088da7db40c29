"""Running out of memory, recognised and survived: the same work again in smaller pieces."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
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


@contextmanager
def collecting_new_garbage_only() -> Iterator[None]:
    """Garbage collections look at what is made inside alone; what was there before is looked at again afterwards.

    A full collection of all that torch and transformers define takes 0.3 s, and came in the middle of a step of 0.1 s.
    Where somebody else has frozen the heap, or a run within a run, it is left to them.
    """
    if gc.get_freeze_count() > _IMMORTAL:
        yield
        return
    gc.collect()  # garbage that is there already would be kept
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


_IMMORTAL = 10_000
"""More objects than Python 3.12 freezes by itself, those that never die."""


def free_memory() -> int | None:
    """Bytes that the host, or the container this runs in, can still give; None where the system does not say (not Linux)."""
    told = _numbers(Path("/proc/meminfo")).get("MemAvailable:")
    if told is None:
        return None
    free = 1024 * told
    group = Path("/sys/fs/cgroup")
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is None or used is None:
        return free
    return min(free, limit - used + _numbers(group / "memory.stat").get("inactive_file", 0))


def device_memory(device: torch.device) -> int | None:
    """Bytes of an accelerator in all, whatever of it is free; None for a CPU and where the device does not say."""
    if device.type in ("cuda", "xpu"):
        return int(getattr(torch, device.type).get_device_properties(device).total_memory)
    return int(torch.mps.recommended_max_memory()) if device.type == "mps" else None


def _numbers(path: Path) -> dict[str, int]:
    """The lines `name number ...` of a file of the system; none where there is no such file."""
    lines = [line.split() for line in path.read_text().splitlines()] if path.is_file() else []
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _number(path: Path) -> int | None:
    """A file of one number; None for "max", and where there is no such file."""
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None
