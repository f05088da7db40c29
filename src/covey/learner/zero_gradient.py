"""Zero-gradient completions, whose backward can be skipped."""

from __future__ import annotations

from covey.algorithms import Algorithm
from covey.algorithms.composing import is_apart
from covey.learner.packing import Row


def can_have_gradient(row: Row, algorithm: Algorithm) -> bool:
    """True if a completion can have a gradient. Terms that scale with the advantage have none where it is zero."""
    acts_alone = any(not is_apart(part) for part in algorithm.regularizers) or algorithm.critic is not None
    acts_alone = acts_alone or (algorithm.kl is not None and algorithm.kl.where == "loss")
    if acts_alone or not getattr(algorithm.objective, "scales_with_advantage", False):
        return True
    return bool((row.advantage != 0).any())
