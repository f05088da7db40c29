"""Recovery from running out of memory: detection, and retries in smaller pieces."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from covey.errors import first_line

T = TypeVar("T")

_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc")
"""Error texts of allocators: CUDA, torch on a CPU, the C library, C++."""


def is_out_of_memory(error: BaseException) -> bool:
    """True for a failed allocation on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in message for sign in _SIGNS)


class Keeper(Protocol):
    """Owner of cached memory that can be released."""

    def release_memory(self) -> None: ...


_KEEPERS: weakref.WeakSet[Keeper] = weakref.WeakSet()


def release_under_pressure(keeper: Keeper) -> None:
    """Call `keeper.release_memory()` whenever memory runs out in this process, while the keeper lives."""
    _KEEPERS.add(keeper)


def release() -> None:
    """Free the memory of a failed attempt and the caches of all keepers."""
    for keeper in list(_KEEPERS):
        keeper.release_memory()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def until_it_fits(work: Callable[[], T], shrink: Callable[[str], None]) -> T:
    """Result of `work()`, retried after `shrink(error text)` each time that memory runs out.

    `shrink` cleans up after the attempt and makes the pieces smaller, or raises if they cannot be smaller. Other
    exceptions of `work` are raised unchanged.
    """
    while True:
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            message = first_line(error)
        release()  # only now: the error's traceback kept the tensors of the attempt alive
        shrink(message)


@contextmanager
def collecting_new_garbage_only() -> Iterator[Callable[[], None]]:
    """Context that freezes existing objects (`gc.freeze`), so that collections inside only scan new ones.

    A full collection over all objects of torch and transformers takes 0.3 s, in the middle of a step of 0.1 s.
    Yields a function that does so once more when it is first called: after the first step, which compiles.
    A no-op if the heap is frozen already, by the user's script or by an outer run.
    """
    if gc.get_freeze_count() > _IMMORTAL:
        yield lambda: None
        return
    _freeze()
    try:
        yield cache(_freeze)
    finally:
        gc.unfreeze()


def _freeze() -> None:
    gc.collect()  # existing garbage would be frozen too
    gc.freeze()


_IMMORTAL = 10_000
"""Upper bound of the immortal objects that Python 3.12 freezes by itself."""


_LIMITS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the controller in /proc/self/cgroup (none: version 2): folder, limit and use of a control group, and its pages that can go."""


def free_memory(root: Path = Path("/")) -> int | None:
    """Available memory of the host, or of the tightest control group of this process, in bytes; None if unknown (not Linux)."""
    kibibytes = _numbers(root / "proc/meminfo").get("MemAvailable:")
    if kibibytes is None:
        return None
    groups = root / "proc/self/cgroup"
    lines = groups.read_text().splitlines() if groups.is_file() else []
    return min([1024 * kibibytes, *(room for line in lines for room in _rooms(root / "sys/fs/cgroup", line))])


def _rooms(mount: Path, line: str) -> Iterator[int]:
    """Bytes left to a control group of this process, a line of /proc/self/cgroup, and to those around it, as far as they have a limit.

    A container may see its own group at the mount, under a path that is the host's.
    """
    _, kinds, place = line.split(":", 2)
    for name, *files, loose in (_LIMITS[kind] for kind in kinds.split(",") if kind in _LIMITS):
        innermost = mount / name / place.lstrip("/")
        for group in (innermost, *innermost.parents):
            if group.is_relative_to(mount / name):
                limit, used = (_number(group / file) for file in files)
                if limit is not None and used is not None:
                    yield limit - used + _numbers(group / "memory.stat").get(loose, 0)


def device_memory(device: torch.device) -> int | None:
    """Total memory of an accelerator in bytes; None for a CPU and if unknown."""
    if device.type in ("cuda", "xpu"):
        return int(getattr(torch, device.type).get_device_properties(device).total_memory)
    return int(torch.mps.recommended_max_memory()) if device.type == "mps" else None


def _numbers(path: Path) -> dict[str, int]:
    """Lines `name number ...` of a system file as a dict; empty if there is no such file."""
    lines = [line.split() for line in path.read_text().splitlines()] if path.is_file() else []
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _number(path: Path) -> int | None:
    """The number in a system file; None for "max", and if there is no such file."""
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None
