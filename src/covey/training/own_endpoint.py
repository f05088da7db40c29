"""Training through a run's own endpoint: the sampler of an agent, its traces, and branches of its calls as rows of their group."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from covey.config import GRPOConfig
from covey.environments import Agent
from covey.errors import ConfigError
from covey.rollout import Sampler
from covey.runs import rollouts, traces
from covey.types import EpisodeNotes, Group

if TYPE_CHECKING:
    from covey.serving import Trace


def agent_sampler(sampler: Sampler, agent: Agent, args: GRPOConfig, trainer: Any) -> Sampler:
    """The sampler of a run whose completions an agent writes. Raises ConfigError where what it needs is missing."""
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"an agent talks to the run's endpoint, which needs {name}: pip install 'covey[agents]'.")
    from covey.serving import AgentSampler

    turns = args.max_tool_calling_iterations
    return AgentSampler(
        sampler,
        agent,
        max_tokens=args.max_completion_length,
        max_turns=None if turns is None else turns + 1,
        timeout_seconds=args.agent_timeout_seconds,
        concurrency=args.agent_concurrency,
        record=partial(_record, args, trainer.world.rank),
    )


def _record(args: GRPOConfig, rank: int, version: int, found: Sequence[Trace]) -> None:
    """Write the traces of the steps whose rollouts are written."""
    from covey.serving import lines_of

    if not rollouts.is_due(version + 1, args.rollout_log_steps) or args.rollout_log_steps == 0:
        return
    folder = Path(str(args.output_dir)) / traces.FOLDER
    traces.append(folder, version + 1, lines_of(found), rank)
    if args.rollout_total_limit is not None:
        traces.thin(folder, args.rollout_total_limit)


def branched(groups: Sequence[Group]) -> list[Group]:
    """The groups with the branches of their episodes as further completions, unscored."""
    return [_branched(group) for group in groups]


def _branched(group: Group) -> Group:
    more = []
    kept = []
    for place, one in enumerate(group.completions):
        notes = one.episode
        if notes is None or not notes.branches:
            kept.append(one)
            continue
        kept.append(replace(one, episode=replace(notes, branches=())))
        for branch in notes.branches:
            shown = branch.episode or EpisodeNotes()
            more.append(replace(branch, episode=replace(shown, shares=place)))
    if not more:
        return group
    rewards = group.rewards
    if rewards is not None:
        rewards = torch.cat([rewards, rewards.new_full((len(more), rewards.shape[1]), torch.nan)])
    extras = {name: [*values, *([None] * len(more))] for name, values in group.extras.items()}
    return replace(group, completions=(*kept, *more), rewards=rewards, extras=extras)


def shared_advantages(group: Group, advantages: Tensor) -> Tensor:
    """Advantages [G] or [G, T] in which a branch has its episode's advantage: the mean over the model's tokens if they are per token."""
    places = [(i, one.episode.shares) for i, one in enumerate(group.completions) if one.episode is not None]
    pairs = [(i, source) for i, source in places if source is not None]
    if not pairs:
        return advantages
    out = advantages.clone()
    for i, source in pairs:
        if advantages.ndim == 1:
            out[i] = advantages[source]
            continue
        written = group.completions[source].written
        own = advantages[source, : len(written)][written]
        mask = group.completions[i].written
        out[i] = 0.0
        out[i, : len(mask)] = mask * (own.mean() if own.numel() else 0.0)
    return out
