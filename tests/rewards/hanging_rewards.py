"""Rewards for worker processes to import: good ones, and some that hang, crash and leave in ways only a kill can end."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import covey.rewards as rewards
from covey.rewards.contract import Total


def length(completions, **kwargs):
    return [float(len(c)) for c in completions]


def talkative(completions, log_extra, log_metric, **kwargs):
    print("x" * 200_000)  # noqa: T201 - what real reward functions do
    log_extra("length", [len(c) for c in completions])
    log_metric("longest", max(len(c) for c in completions))
    log_metric("calls", Total(3, "here"))
    return (len(c) for c in completions)


def words(completions, **kwargs):
    return ["high" for _ in completions]


def picky(completions, **kwargs):
    if any("x" in c for c in completions):
        raise ValueError("no number in it")
    return [1.0 for _ in completions]


def hang_in_regular_expression(completions, **kwargs):
    re.match(r"(a+)+$", "a" * 60 + "b")


def hang_in_c_with_the_lock(completions, **kwargs):
    sum(range(10**14))  # never looks at signals, never lets another thread run


def hang_in_c_library(completions, **kwargs):
    while True:
        ctypes.PyDLL(None).sleep(1000)  # holds the interpreter lock


def hang_and_ignore_signals(completions, **kwargs):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        try:
            time.sleep(1000)
        except BaseException:  # noqa: BLE001
            continue


def hang_with_a_child(completions, file, **kwargs):
    """Writes the child's process id to `file`."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    Path(file[0]).write_text(str(child.pid))
    time.sleep(1000)


def leaves(completions, **kwargs):
    os._exit(0)


def crashes_on_x(completions, **kwargs):
    if any("x" in c for c in completions):
        os.kill(os.getpid(), signal.SIGSEGV)
    return [1.0 for _ in completions]


@rewards.per_completion(isolated=True, concurrency=2, timeout=1.0)
def hangs_on_x(completion, **columns):
    if "x" in completion:
        hang_in_c_with_the_lock([])
    return float(len(completion))
