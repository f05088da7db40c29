"""Types of the functions that an algorithm is made of, and of rewards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from covey.types.reports import StepReport
from covey.types.values import Scores, TokenBatch, Totals

# The callables that an algorithm is made of. A slot takes a function; a class only when it has parameters.
Advantage = Callable[[Scores], Tensor]
"""-> [P, G] or [P, G, T]; NaN in, 0 out."""
Objective = Callable[[TokenBatch], Tensor]
"""-> [N, T] (or [N, 1], broadcast), the loss of each token; never a mean."""
Estimator = Callable[[Tensor, Tensor], Tensor]
"""(logp, ref_logp) -> [N, T]"""
Weight = Callable[[TokenBatch], Tensor]
"""-> [N, T] or [N, 1], multiplies the objective, without gradient: importance corrections, masks."""
Regularizer = Callable[[TokenBatch], Tensor]
"""-> [N, T], already weighted, added to the loss."""
Aggregate = Callable[[Tensor, TokenBatch, Totals], Tensor]
"""-> scalar, this micro-batch's share; shares add up."""
ReferenceRule = Callable[[StepReport], float]
"""-> alpha: ref <- (1 - alpha) ref + alpha policy"""
Reward = Callable[..., Any]
"""TRL's contract: keyword lists `prompts`, `completions`, `completion_ids`, every data set column; -> list of float or None."""
