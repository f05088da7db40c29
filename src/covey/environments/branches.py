"""Stage of agents' episodes: metrics of tool calls, and branches of an agent's calls as further rows of their group."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from covey.types import Completion, EpisodeNotes, Group, Max, Mean, Message, Metric, Position, Stages, ToolCall


def episode_stages() -> Stages:
    """Branches join their group before advantages, and get their episode's advantage after."""
    return Stages(before_advantages=(Branches(),), after_advantages=(BranchAdvantages(),))


@dataclass
class Branches:
    """Measures tool calls, and adds the branches of episodes as further completions, unscored."""

    phase: Literal["learn"] = "learn"
    _metrics: dict[str, Metric] = field(default_factory=dict)

    def __call__(self, groups: Sequence[Group], position: Position) -> list[Group]:
        self._metrics = tool_metrics([completion for group in groups for completion in group.completions])
        return [with_branches(group) for group in groups]

    def take_metrics(self) -> dict[str, Metric]:
        return self._metrics


@dataclass(frozen=True)
class BranchAdvantages:
    """Gives each branch the advantage of its episode."""

    phase: Literal["learn"] = "learn"

    def __call__(self, groups: Sequence[Group], position: Position) -> list[Group]:
        return [share_advantages(group) for group in groups]


def with_branches(group: Group) -> Group:
    """The group with the branches of its episodes as further completions, unscored."""
    more = []
    episodes = []
    for place, completion in enumerate(group.completions):
        notes = completion.episode
        if notes is None or not notes.branches:
            episodes.append(completion)
            continue
        episodes.append(replace(completion, episode=replace(notes, branches=())))
        for branch in notes.branches:
            shown = branch.episode or EpisodeNotes()
            more.append(replace(branch, episode=replace(shown, shares=place)))
    if not more:
        return group
    grown = lambda scores: (
        None if scores is None else torch.nn.functional.pad(scores, (0, 0, 0, len(more)), value=torch.nan)
    )
    extras = {name: [*values, *([None] * len(more))] for name, values in group.extras.items()}
    return replace(
        group,
        completions=(*episodes, *more),
        rewards=grown(group.rewards),
        measured=grown(group.measured),
        lost=None if group.lost is None else torch.nn.functional.pad(group.lost, (0, len(more))),
        extras=extras,
    )


def share_advantages(group: Group) -> Group:
    """The group with its episodes' advantages [G] or [G, T] for their branches: the mean over the model's tokens if they are per token."""
    advantages = group.advantages
    sources = [None if completion.episode is None else completion.episode.shares for completion in group.completions]
    pairs = [(i, source) for i, source in enumerate(sources) if source is not None]
    if not pairs or advantages is None:
        return group
    shared = advantages.clone()
    for i, source in pairs:
        shared[i] = _branch_advantage(advantages[source], group.completions[source], group.completions[i])
    lost = set[int]() if group.totals is None else {i for i, source in pairs if bool(group.totals[source].isnan())}
    unscored = lambda branch: replace(branch, episode=replace(branch.episode, is_scored=False))
    completions = tuple(unscored(each) if i in lost else each for i, each in enumerate(group.completions))
    return replace(group, advantages=shared, completions=completions)


def _branch_advantage(advantage: Tensor, episode: Completion, branch: Completion) -> Tensor:
    """The advantage, scalar or [T], of a branch of the episode."""
    if advantage.ndim == 0:
        return advantage
    written = episode.written
    of_written = advantage[: len(written)][written]
    out = torch.zeros_like(advantage)
    out[: len(branch.written)] = branch.written * (of_written.mean() if of_written.numel() else 0.0)
    return out


def spoken(completion: Completion) -> Sequence[Message]:
    """Messages of an episode; of an agent's that returned an answer, the conversation that led to it."""
    if completion.messages is not None:
        return completion.messages
    return () if completion.episode is None else completion.episode.conversation


def tool_metrics(completions: Sequence[Completion]) -> dict[str, Metric]:
    """Tool call metrics per completion and per tool, under TRL's names where they exist; empty for single turns."""
    completions = [
        completion for completion in completions if completion.episode is None or completion.episode.shares is None
    ]
    if all(completion.messages is None and completion.episode is None for completion in completions):
        return {}
    calls = [call for completion in completions for call in completion.tool_calls]
    turns = [sum(1 for message in spoken(completion) if message["role"] == "assistant") for completion in completions]
    metrics: dict[str, Metric] = {
        "tools/call_frequency": Mean(len(calls), len(completions)),
        "tools/failure_frequency": Mean(sum(call.status != "ok" for call in calls), len(calls)),
        "tools/turns": Mean(sum(turns), len(turns)),
        "tools/looping": Mean(sum(_loops(completion.tool_calls) for completion in completions), len(completions)),
    }
    for name in sorted({call.name for call in calls if call.name}):
        of_tool = [call for call in calls if call.name == name]
        metrics |= {
            f"tools/{name}/calls": Mean(len(of_tool), len(completions)),
            f"tools/{name}/errors": Mean(sum(call.status == "error" for call in of_tool), len(of_tool)),
            f"tools/{name}/timeouts": Mean(sum(call.status == "timeout" for call in of_tool), len(of_tool)),
            f"tools/{name}/seconds": Mean(sum(call.seconds for call in of_tool), len(of_tool)),
            f"tools/{name}/max_seconds": Max(max(call.seconds for call in of_tool)),
        }
    return metrics


def _loops(calls: Sequence[ToolCall]) -> bool:
    """True if one call was made with the same arguments three times or more."""
    made = Counter((call.name, json.dumps(call.arguments, sort_keys=True, default=str)) for call in calls)
    return max(made.values(), default=0) >= 3
