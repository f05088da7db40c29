"""Liveness of a run whose `run.json` says "running": a killed process could not write that it ended."""

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SILENT_SECONDS = 6 * 3600.0
"""Seconds without a new record after which a run on another machine is called silent: its process cannot be checked from here."""
_RECORDS = ("run.json", "metrics.jsonl", "events.jsonl")


def state_of(manifest: Mapping[str, Any], folder: Path) -> str:
    """State in `run.json` (`finished`, `stopped`, `failed`), or for one that says `running`: that, `died` or `silent`.

    `died`: the process that wrote it ran on this machine and is gone, or another has its number now. `silent`: it ran on
    another machine, and no record has grown for six hours. `unknown` where nothing is said.
    """
    state = str(manifest.get("state", "unknown"))
    attempts = manifest.get("attempts")
    last = attempts[-1] if isinstance(attempts, list) and attempts else {}
    if state != "running" or not isinstance(last, Mapping) or not isinstance(last.get("process"), int):
        return state
    if last.get("host") == platform.node():
        mark = last.get("process_mark")
        return state if is_alive(last["process"], mark if isinstance(mark, str) else None) else "died"
    files = [path for name in _RECORDS if (path := folder / name).is_file()]
    last_written = max((path.stat().st_mtime for path in files), default=0.0)
    return state if time.time() - last_written < SILENT_SECONDS else "silent"


def is_alive(process: int, mark: str | None = None) -> bool:
    """True if the process with this PID is alive and, where `mark` is given, has not been replaced by another with its PID."""
    if not 0 < process < 2**31:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, under another user
        return mark in (None, mark_of(process))
    is_over = _words(process)[:1] in (["Z"], ["X"])  # a zombie, or dead
    return not is_over and mark in (None, mark_of(process))


def mark_of(process: int) -> str | None:
    """Mark that tells a process from a later one with its PID: boot id and start time in clock ticks (Linux)."""
    words = _words(process)
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return f"{boot}/{words[19]}" if len(words) > 19 else None


def _words(process: int) -> list[str]:
    """Fields of `/proc/PID/stat` after the name; empty if the process does not exist."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
