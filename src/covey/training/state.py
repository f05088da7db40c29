"""State of a run that must survive a kill, except weights and optimizer, which have a state_dict of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from covey.algorithms import Algorithm
from covey.types import Group, Mean, Metric, Position, StepReport, merge_metrics

LOSSES = ("loss", "policy_loss", "value_loss", "aux_loss")
"""Metrics that add up over the micro-batches of a step; over several steps or batches they are a mean of those sums."""


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Position and counters of a run. Each step of the loop takes one and returns the next."""

    step: int = 0
    """Number of completed optimizer steps."""
    pending: tuple[tuple[Group, ...], ...] = ()
    """Sampled and scored batches that wait for their optimizer step, next one first."""
    num_tokens: int = 0
    """Prompt and completion tokens trained on so far."""
    num_rollouts: int = 0
    """Number of generation batches so far."""
    controllers: Mapping[str, float] = field(default_factory=dict)
    """Value of each adaptive coefficient, and of an advantage's memory."""
    bad_steps: int = 0
    """Consecutive steps whose update was skipped for bad numbers."""
    roll_backs: int = 0
    """Number of rollbacks to a checkpoint."""
    set_aside: tuple[str, ...] = ()
    """Excluded prompts, which led to bad numbers, by the row of the data set."""
    rollout_metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics of the generation batch that the next report carries."""
    rollout_seconds: Mapping[str, float] = field(default_factory=dict)
    is_evaluation_due: bool = False
    """True in a checkpoint whose step was still to be evaluated when it was written; a resume evaluates first."""

    def queued(
        self,
        batches: Sequence[Sequence[Group]],
        metrics: Mapping[str, Metric],
        seconds: Mapping[str, float],
        memory: Mapping[str, float],
    ) -> TrainState:
        """The state with the batches of a new rollout queued, and the advantage's `memory` after it, which is logged."""
        return replace(
            self,
            pending=(*self.pending, *(tuple(batch) for batch in batches)),
            num_rollouts=self.num_rollouts + 1,
            controllers={**self.controllers, **memory},
            rollout_metrics=merge_metrics(
                [self.rollout_metrics, metrics, {name: Mean(value, 1.0) for name, value in memory.items()}]
            ),
            rollout_seconds={**self.rollout_seconds, **seconds},
        )

    @property
    def position(self) -> Position:
        """Position at which stages are called."""
        return Position(
            step=self.step, rollout=self.num_rollouts, num_pending=len(self.pending), set_aside=self.set_aside
        )

    def advanced(self, report: StepReport, algorithm: Algorithm, *, drop_pending: bool = False) -> TrainState:
        """The state after an optimizer step. `drop_pending` discards the rest of this rollout (target-KL early stop).

        Adaptive coefficients stay as they are after a skipped update, whose metrics would make them NaN.
        """
        tokens = report["num_tokens"]
        controllers = self.controllers if report.skips_update else algorithm.advance(self.controllers, report)
        return replace(
            self,
            step=self.step + 1,
            pending=() if drop_pending else self.pending[1:],
            num_tokens=self.num_tokens + (int(tokens) if tokens == tokens else 0),
            controllers=dict(controllers),
            bad_steps=self.bad_steps + 1 if report.skips_update else 0,
            rollout_metrics={},
            rollout_seconds={},
            is_evaluation_due=False,
        )

    def to_dict(self) -> dict[str, Any]:
        """Fields as a dict, for the checkpoint."""
        return {item.name: getattr(self, item.name) for item in fields(self)}
