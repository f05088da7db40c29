"""Types of the functions that an algorithm is made of, of rewards, and of the stages of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

from torch import Tensor

from covey.types.metrics import Metric
from covey.types.reports import StepReport
from covey.types.tokens import TokenBatch, Totals
from covey.types.values import Group, Scores

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


@dataclass(frozen=True, kw_only=True)
class Position:
    """Position of a run at which a stage is called."""

    step: int
    """Number of completed optimizer steps."""
    rollout: int
    """Number of completed rollouts."""
    num_pending: int
    """Batches that wait for their optimizer step, the current one included."""
    set_aside: tuple[str, ...]
    """Excluded prompts, by the row of the data set."""


class Stage(Protocol):
    """A feature's transformation of the groups of a step: groups -> groups.

    A stage that has metrics adds `take_metrics() -> {name: Metric}`, which is read once after each call.
    """

    @property
    def phase(self) -> Literal["rollout", "reward", "learn"]:
        """The phase to which its seconds count."""

    def __call__(self, groups: Sequence[Group], position: Position) -> list[Group]: ...


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Stages of a run, by the place in the step where they act."""

    after_rewards: tuple[Stage, ...] = ()
    """Called with this process's groups of one draw, as soon as they are scored."""
    before_advantages: tuple[Stage, ...] = ()
    """Called with all groups of the rollout."""
    after_advantages: tuple[Stage, ...] = ()
    """Called with all groups of the rollout, last before they are queued."""
    before_update: tuple[Stage, ...] = ()
    """Called with the batch of each optimizer step."""

    def __add__(self, other: Stages) -> Stages:
        """Both, these stages first at every place."""
        return Stages(**{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)})

    def rollout_metrics(self) -> dict[str, Metric]:
        """Metrics of the stages of the last rollout."""
        return stage_metrics((*self.after_rewards, *self.before_advantages, *self.after_advantages))

    def update_metrics(self) -> dict[str, Metric]:
        """Metrics of the stages before the last update."""
        return stage_metrics(self.before_update)


def stage_metrics(stages: Sequence[Stage]) -> dict[str, Metric]:
    """Metrics of the stages' last calls."""
    takers = [getattr(stage, "take_metrics", None) for stage in stages]
    return {name: metric for take in takers if take is not None for name, metric in take().items()}
