"""Names a too high learning rate as the cause in alerts about its consequences."""

from covey.monitor.history import History

MOST = 0.05
"""Largest relative update of the weights in one step. Healthy runs stay below 0.01."""
LOWER_RATE = (
    "lower learning_rate: training all weights wants about 1e-6 to 3e-6, LoRA 1e-5 to 2e-4, a model below 100 million weights "
    "1e-4 to 1e-3"
)


def blamed(seen: History, sentence: str, advice: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Message and advice of an alert, with the learning rate in front where steps of this run were as large as `MOST`."""
    sizes, rates = seen["update/all"], seen["learning_rate"]
    all_sizes, used = [*sizes.first, *sizes.recent], [*rates.first, *rates.recent]
    if not all_sizes or not used or max(all_sizes) < MOST:
        return sentence, advice
    cause = f"{sentence}; a learning_rate of {max(used):.3g} has moved the weights by up to {max(all_sizes):.0%} of their size in a step"
    return cause, (LOWER_RATE, *(hint for hint in advice if not hint.startswith("lower learning_rate")))
