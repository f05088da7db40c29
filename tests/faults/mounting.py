"""Permission to mount a small disk."""

from __future__ import annotations

import subprocess
from functools import cache


@cache
def can_mount(*prefix: str) -> bool:
    """Whether a tmpfs can be mounted here, by way of `prefix`."""
    script = "d=$(mktemp -d) && mount -t tmpfs -o size=1m none $d && umount $d && rmdir $d"
    try:
        return subprocess.run([*prefix, "sh", "-c", script], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
