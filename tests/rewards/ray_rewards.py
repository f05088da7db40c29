"""Rewards that actors of the tests import: sound ones, and ones that raise, end their process or hang."""

import os
import time
from pathlib import Path

from covey.rewards import per_completion, reward


def length(completions, place, log_extra, log_metric, **columns):
    log_extra("process", [os.getpid()] * len(completions))
    log_metric("calls", 1.0)
    return [len(text) + 100 * p for text, p in zip(completions, place, strict=True)]


def picky(completions, **columns):
    if "bad" in completions:
        raise ValueError("I do not read this")
    return [float(len(text)) for text in completions]


def deadly(completions, folder, **columns):
    """Ends its process at the first call of each `folder`."""
    mark = Path(folder[0]) / "was-here"
    if not mark.exists():
        mark.touch()
        os._exit(9)
    return [1.0] * len(completions)


def deadly_length(completions, folder, place, **columns):
    """Scores as `alone` does, from a process that ends at the first call."""
    deadly(completions, folder)
    return [len(text) + p for text, p in zip(completions, place, strict=True)]


def fatal(completions, **columns):
    if "bad" in completions:
        os._exit(9)
    return [1.0] * len(completions)


@reward(timeout=4.0)
def slow(completions, **columns):
    if "slow" in completions:
        time.sleep(3600)
    return [1.0] * len(completions)


@per_completion
async def alone(completion, place, **columns):
    return len(completion) + place
