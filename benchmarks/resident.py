"""Resident memory of this process, read from /proc (Linux)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def resident(name: str) -> float:
    """MiB of a line of /proc/self/status: VmRSS now, VmHWM at most."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) / 1024


@contextmanager
def peak_since() -> Iterator[Callable[[], float]]:
    """Yields a function that says the highest resident memory since here, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    yield lambda: resident("VmHWM")
