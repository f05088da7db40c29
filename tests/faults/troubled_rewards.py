"""Rewards that go wrong in turn, for whole runs to survive: by the step, so that a resumed run meets the same trouble."""

from __future__ import annotations

import math
import time

import covey.rewards as rewards


def troubled(completions, trainer_state, **columns):
    """Raises, hangs and returns rubbish in turn, and scores in between."""
    step = trainer_state.global_step
    if step % 6 == 1:
        raise ValueError(f"trouble at step {step}")
    if step % 6 == 3:
        time.sleep(1000)
    if step % 6 == 5:
        return [math.inf if i % 2 else "rubbish" for i in range(len(completions))]
    return [len(c) / 100 for c in completions]


@rewards.reward(isolated=True, streams=True, timeout=2.0)
def stuck_in_c(completions, trainer_state, **columns):
    """Hangs in C with the interpreter lock held, on the second step only."""
    if trainer_state.global_step == 1:
        sum(range(10**14))
    return [float(len(c) % 7) for c in completions]


@rewards.reward(streams=True, pure=True)
async def steady(completions, **columns):
    return [float(len(c) % 5) for c in completions]


@rewards.reward(isolated=True, streams=True, timeout=600.0)
def stuck_for_ever(completions, **columns):
    sum(range(10**14))


def stuck_here(completions, **columns):
    sum(range(10**14))
