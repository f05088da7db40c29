"""Processor cores that a process may use, and the processes that share a machine."""

import math
import os
from contextlib import suppress
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of processor time that a container has in each period, and the period (Linux, control groups 2)."""


def usable_cores() -> int:
    """Cores that this process may run on, within the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no container, or one without a quota: `max`
        quota, period = map(int, _QUOTA.read_text().split())
        cores = min(cores, max(1, math.ceil(quota / period)))
    return cores


def cores_of_rank() -> int:
    """This process's share of the usable cores, which the ranks of this machine divide."""
    return max(1, usable_cores() // processes_here())


def processes_here() -> int:
    """Processes of the run on this machine, which share its memory and cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
