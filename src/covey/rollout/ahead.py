"""Prompts of the next rollout: from the stream on demand, or of a rollout that was ordered ahead under a staleness limit.

A rollout is ordered only if its first update will be at most `max_staleness` updates behind the newest
weights, so every ordered rollout is used and none is discarded.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from covey.data import PromptStream
from covey.data.stream import take
from covey.errors import CheckpointError
from covey.rollout.asynchronous import AsynchronousSampler
from covey.rollout.sampler import SamplingParams
from covey.types import Group, Max, Mean, Metric, Position, Prompt, Stages, Sum

logger = logging.getLogger(__name__)


class PromptSupply(Protocol):
    """Source of the prompts of each rollout."""

    @property
    def stages(self) -> Stages:
        """Stages of the rollouts ahead; none on demand."""

    def next_prompts(self, n: int, set_aside: Sequence[str]) -> Sequence[Prompt]:
        """The `n` prompts of the next rollout."""

    def further_prompts(self, n: int, set_aside: Sequence[str]) -> Sequence[Prompt]:
        """`n` more prompts for the same rollout, of dynamic sampling."""

    def state_dict(self) -> dict[str, Any] | None: ...

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None: ...


@dataclass(frozen=True)
class OnDemand:
    """The next prompts of the data set."""

    prompts: PromptStream
    stages: Stages = field(default_factory=Stages)

    def next_prompts(self, n: int, set_aside: Sequence[str]) -> Sequence[Prompt]:
        return take(self.prompts, n, set_aside)

    further_prompts = next_prompts

    def state_dict(self) -> None:
        """None: nothing is ordered ahead."""

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Raises CheckpointError for a checkpoint with rollouts that ran ahead."""
        if state and state["orders"]:
            raise CheckpointError(
                f"The checkpoint holds {len(state['orders'])} rollout(s) that ran ahead; resume with async_rollouts=True, "
                "max_staleness=0 to train on them and go on without."
            )


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """Prompts of the oldest ordered rollout; orders further rollouts while the learner works."""

    prompts: PromptStream
    sampler: AsynchronousSampler
    prompts_per_rollout: int
    num_generations: int
    updates_per_rollout: int
    total_steps: int
    max_staleness: int
    """Most optimizer updates between the order of a rollout and its first use."""
    depth: int
    """Most rollouts ordered ahead."""
    sampling_for: Callable[[int], SamplingParams]
    """Sampling parameters of a rollout, by its number."""
    is_stopping: Callable[[], bool]

    def __post_init__(self) -> None:
        most = 1 + (self.max_staleness - 1) // self.updates_per_rollout
        if self.max_staleness and self.depth > most:
            sentence = "pipeline_depth=%d orders no more rollouts ahead than %d: max_staleness=%d ends there, at %d update(s) a rollout."
            logger.warning(sentence, self.depth, most, self.max_staleness, self.updates_per_rollout)

    @property
    def stages(self) -> Stages:
        """Ordering before each update, and the release of a rollout that was used."""
        return Stages(before_update=(OrderStage(self),), after_advantages=(ReleaseStage(self.sampler),))

    def next_prompts(self, n: int, set_aside: Sequence[str]) -> Sequence[Prompt]:
        """Prompts of the oldest ordered rollout, or the next prompts of the data set."""
        if self.sampler.orders:
            return next(iter(self.sampler.orders.values())).prompts
        return take(self.prompts, n, set_aside)

    def further_prompts(self, n: int, set_aside: Sequence[str]) -> Sequence[Prompt]:
        return take(self.prompts, n, set_aside)

    def order(self, position: Position) -> None:
        """Order further rollouts, as far as staleness and depth allow, before the learner's next update."""
        orders = self.sampler.orders
        while len(orders) < self.depth:
            until_used = position.num_pending + len(orders) * self.updates_per_rollout
            if until_used > self.max_staleness or position.step + until_used >= self.total_steps:
                return
            prompts = take(self.prompts, self.prompts_per_rollout, position.set_aside)
            sampling = self.sampling_for(position.rollout + len(orders))
            self.sampler.order(prompts, self.num_generations, sampling, at_least=position.step)

    def state_dict(self) -> dict[str, Any]:
        """State of the ordered rollouts, after waiting for them unless the run is stopping."""
        self.sampler.finish(self.is_stopping)
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Resume the ordered rollouts of a checkpoint; None: there were none."""
        self.sampler.load_state_dict(state or {"orders": []}, self.prompts.again)


@dataclass
class OrderStage:
    """Orders rollouts ahead of each update, and measures the staleness of its batch."""

    ahead: Ahead
    phase: Literal["rollout"] = "rollout"
    _metrics: dict[str, Metric] = field(default_factory=dict)

    def __call__(self, groups: Sequence[Group], position: Position) -> list[Group]:
        self.ahead.order(position)
        self._metrics = staleness(groups, position.step)
        return list(groups)

    def take_metrics(self) -> dict[str, Metric]:
        return self._metrics


@dataclass
class ReleaseStage:
    """Drops the order of a rollout once its groups are complete, and takes the timing metrics of the sampler."""

    sampler: AsynchronousSampler
    phase: Literal["rollout"] = "rollout"
    _wasted: int = 0

    def __call__(self, groups: Sequence[Group], position: Position) -> list[Group]:
        self._wasted = self.sampler.forget_first()
        return list(groups)

    def take_metrics(self) -> dict[str, Metric]:
        return {**self.sampler.take_metrics(), "wasted_tokens": Sum(float(self._wasted))}


def staleness(batch: Sequence[Group], step: int) -> dict[str, Metric]:
    """Staleness metrics: optimizer updates between sampling and training, over the tokens of a batch."""
    ages = [step - completion.token_versions[completion.written] for group in batch for completion in group.completions]
    flat = torch.cat([torch.zeros(0, dtype=torch.int64), *ages])
    if not flat.numel():
        return {}
    return {
        "staleness/mean": Mean(float(flat.sum()), int(flat.numel())),
        "staleness/max": Max(float(flat.max())),
    }
