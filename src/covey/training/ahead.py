"""Asynchronous rollouts: ordering under a staleness limit, their prompts, and staleness metrics.

A rollout is ordered only if its first update will be at most `max_staleness` updates behind the newest
weights, so every ordered rollout is used and none is discarded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from covey.errors import CheckpointError
from covey.rollout.asynchronous import AsynchronousSampler
from covey.training.parts import Parts
from covey.training.prompts import take
from covey.training.state import TrainState
from covey.types import Group, Max, Mean, Metric, Prompt, Sum


def order_ahead(parts: Parts, state: TrainState) -> None:
    """Order further rollouts, as far as staleness and depth allow, before the learner's next update."""
    sampler = parts.sampler
    if not isinstance(sampler, AsynchronousSampler) or not state.pending:
        return
    updates = parts.batches_per_rollout * parts.num_iterations
    while len(sampler.orders) < parts.pipeline_depth:
        until_used = len(state.pending) + len(sampler.orders) * updates
        if until_used > parts.max_staleness or state.step + until_used >= parts.total_steps:
            return
        prompts = take(parts.prompts, parts.prompts_per_rollout, state.set_aside)
        sampling = parts.sampling_for(state.num_rollouts + len(sampler.orders))
        sampler.order(prompts, parts.num_generations, sampling, at_least=state.step)


def next_prompts(parts: Parts, state: TrainState) -> Sequence[Prompt]:
    """Prompts of the oldest ordered rollout, or the next prompts of the data set."""
    if isinstance(parts.sampler, AsynchronousSampler) and parts.sampler.orders:
        return next(iter(parts.sampler.orders.values())).prompts
    return take(parts.prompts, parts.prompts_per_rollout, state.set_aside)


def used(parts: Parts) -> dict[str, Metric]:
    """Drop the order of a consumed rollout. Returns the timing metrics of the sampler."""
    sampler = parts.sampler
    if not isinstance(sampler, AsynchronousSampler):
        return {}
    wasted = sampler.forget_first()
    return {**sampler.take_metrics(), "wasted_tokens": Sum(float(wasted))}


def staleness(parts: Parts, batch: Sequence[Group], step: int) -> dict[str, Metric]:
    """Staleness metrics: optimizer updates between sampling and training, over the tokens of a batch."""
    if not isinstance(parts.sampler, AsynchronousSampler):
        return {}
    ages = [step - one.token_versions[one.written] for group in batch for one in group.completions]
    flat = torch.cat([torch.zeros(0, dtype=torch.int64), *ages])
    if not flat.numel():
        return {}
    return {
        "staleness/mean": Mean(float(flat.sum()), int(flat.numel())),
        "staleness/max": Max(float(flat.max())),
    }


def in_flight(parts: Parts) -> dict[str, Any] | None:
    """State of the ordered rollouts for a checkpoint, after waiting for them unless the run is stopping. None: synchronous sampler."""
    if not isinstance(parts.sampler, AsynchronousSampler):
        return None
    parts.sampler.finish(parts.interruption.is_asked)
    return parts.sampler.state_dict()


def restore_in_flight(parts: Parts, saved: Mapping[str, Any] | None) -> None:
    """Resume the ordered rollouts of a checkpoint. Raises CheckpointError if the sampler is synchronous now."""
    if isinstance(parts.sampler, AsynchronousSampler):
        parts.sampler.load_state_dict(saved or {"orders": []}, parts.prompts.again)
    elif saved and saved["orders"]:
        raise CheckpointError(
            f"The checkpoint holds {len(saved['orders'])} rollout(s) that ran ahead; resume with async_rollouts=True, "
            "max_staleness=0 to train on them and go on without."
        )
