"""A learning rate that is too high, named by the alerts of what it broke."""

from __future__ import annotations

from covey.monitor.history import History

MOST = 0.05
"""Largest relative update of the weights in one step. Healthy runs stay below 0.01."""
LOWER_RATE = (
    "lower learning_rate: training all weights wants about 1e-6 to 3e-6, LoRA 1e-5 to 2e-4, a model below 100 million weights "
    "1e-4 to 1e-3"
)


def blamed(seen: History, said: str, advice: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Message and advice of an alert, with the learning rate in front where steps of this run were as large as `MOST`."""
    sizes, rates = seen["update/all"], seen["learning_rate"]
    known, used = [*sizes.first, *sizes.recent], [*rates.first, *rates.recent]
    if not known or not used or max(known) < MOST:
        return said, advice
    cause = f"{said}; a learning_rate of {max(used):.3g} has moved the weights by up to {max(known):.0%} of their size in a step"
    return cause, (LOWER_RATE, *(one for one in advice if not one.startswith("lower learning_rate")))
