"""Formulas compared by math-verify in a process of its own that is killed when it takes too long."""

import atexit
import contextlib
import importlib.util
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from functools import lru_cache
from typing import Any

_START_SECONDS = 60.0
_LONGEST = 2000
"""Characters of an answer that are read; the end of a longer text."""


class InterruptedComparisonError(TimeoutError):
    """A comparison that ended before its processor time was used up: on a busy machine, or without memory."""


class Verifier:
    """Compares answers in a child process, started when first needed and again after each time it had to be killed."""

    def __init__(self, timeout_seconds: float = 1.0) -> None:
        self.timeout_seconds = timeout_seconds
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._lock = threading.Lock()

    def is_equal(self, gold: str, answer: str, *, anchored: bool = False, seconds: float | None = None) -> bool | None:
        """True if both formulas are equal; `None` when the gold one cannot be parsed.

        `anchored`: both are texts, and the answer is taken only from a box or between dollar signs. `seconds` of an idle core's
        time, else `timeout_seconds`. Raises TimeoutError when they do not suffice, InterruptedComparisonError when they were not to be had.
        """
        seconds = self.timeout_seconds if seconds is None else seconds
        with self._lock:
            first, number = self._process is None, next(self._ids)
            process = self._running()
            request = {"id": number, "gold": gold[-_LONGEST:], "answer": answer[-_LONGEST:], "anchored": anchored}
            try:
                assert process.stdin is not None
                process.stdin.write(json.dumps({**request, "seconds": seconds}) + "\n")
                process.stdin.flush()
            except OSError:
                self._kill()
                return None
            # of the clock, for a process that keeps its limit of processor time itself where it can fork
            wall = 200 * seconds + 60 if hasattr(os, "fork") else seconds
            return self._reply(number, time.monotonic() + wall + (_START_SECONDS if first else 0.0))

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            self._kill()

    def _reply(self, expected: int, until: float) -> bool | None:
        while True:
            try:
                line = self._replies.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                self._kill()
                raise InterruptedComparisonError from None
            if line is None:  # the process is gone
                self._kill()
                return None
            reply = json.loads(line)
            if reply["id"] == expected:  # others answer a call that was interrupted
                if reply["end"] != "whole":
                    raise TimeoutError if reply["end"] == "late" else InterruptedComparisonError
                return None if reply["equal"] is None else bool(reply["equal"])

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "covey.rewards.builtin.verifier"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._replies = queue.SimpleQueue()
            reader = threading.Thread(target=_read, args=(self._process, self._replies), daemon=True)
            reader.start()
        return self._process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.wait()


def _read(process: subprocess.Popen[str], replies: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError):  # the pipe was closed while it was read
        for line in process.stdout:
            replies.put(line)
    replies.put(None)


@lru_cache
def is_installed() -> bool:
    return importlib.util.find_spec("math_verify") is not None


_idle: list[Verifier] = []


def is_equal(gold: str, answer: str, **options: Any) -> bool | None:
    """`Verifier.is_equal` of one that no other thread of this process uses now; it ends with the process."""
    try:
        verifier = _idle.pop()
    except IndexError:
        verifier = Verifier()
        atexit.register(verifier.close)
    try:
        return verifier.is_equal(gold, answer, **options)
    finally:
        _idle.append(verifier)
