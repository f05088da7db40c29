"""Advantages by what a completion is: its role in self-play (RAE), which is never compared with its opponent's, or a failure with a right sibling (SRPO)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace

import torch
from torch import Tensor

from covey.algorithms.advantages import GroupNormalized, sequence_rewards
from covey.algorithms.composing import Wrapping, zeroed
from covey.declared import BelowOne, Finite, checked_dataclass
from covey.types import Advantage, Scores, lowest_passing


@checked_dataclass(frozen=True)
class SampleRouted(Wrapping):
    """An advantage, 0 for the failed completions of groups in which one is right: a distillation corrects these.

    A completion is right from a reward of `threshold` on. Failed ones count in the group's mean and deviation. For
    `distill("policy", feedback="best", threshold=...)` with it. Li et al. 2026, section 3.1, <https://arxiv.org/abs/2604.02288>.
    """

    advantage: Advantage = field(default_factory=GroupNormalized)
    threshold: Finite = 0.5

    @property
    def least_group(self) -> int:
        """Completions a prompt that it takes."""
        return int(getattr(self.advantage, "least_group", 1))

    def __call__(self, scores: Scores) -> Tensor:
        rewards = sequence_rewards(scores)
        lowest = lowest_passing(self.threshold)
        routed = (rewards < lowest) & (rewards >= lowest).any(-1, keepdim=True)
        return zeroed(self.advantage(scores), routed)


_ALL = "all"
"""Role of completions that have none."""


@checked_dataclass(frozen=True)
class RoleConditioned:
    """`A = R - b`, then `b <- decay b + (1 - decay) R`: b is an exponential average of the returns of the completion's role.

    Averages start at 0 and move completion by completion, in the order of the rollout; each completion is judged before it moves
    its average. A role is the one that an environment or an agent names (`EpisodeNotes.role`), or the value of `column` of the
    prompt; with both it is the pair, as the paper's (game, role). Without either all completions have one role. No division by a
    deviation. Liu et al. 2025, "SPIRAL", section 3.3, <https://arxiv.org/abs/2506.24119>, decay as there.
    """

    column: str | None = None
    decay: BelowOne = 0.95
    averages: Mapping[str, float] = field(default_factory=dict)
    """By role, before these completions; a run keeps them in its state."""
    exempt = ("tied_groups", "order")

    def __call__(self, scores: Scores) -> Tensor:
        out = torch.zeros_like(scores.total)
        for p, g, _, advantage in self._judged(scores, dict(self.averages)):
            out[p, g] = advantage
        return out

    def recalled(self, averages: Mapping[str, float]) -> RoleConditioned:
        """The part with these averages, where there are any."""
        return replace(self, averages=dict(averages)) if averages else self

    def remembered(self, scores: Scores) -> dict[str, float]:
        """The averages after these completions."""
        averages = dict(self.averages)
        for _ in self._judged(scores, averages):
            pass
        return averages

    def _judged(self, scores: Scores, averages: dict[str, float]) -> Iterator[tuple[int, int, str, float]]:
        """(prompt, completion, role, advantage) of every scored completion; moves the averages."""
        for p, row in enumerate(sequence_rewards(scores).tolist()):
            for g, reward in enumerate(row):
                if reward != reward:  # unscored
                    continue
                role = self._role(scores, p, g)
                before = averages.get(role, 0.0)
                yield p, g, role, reward - before
                averages[role] = self.decay * before + (1.0 - self.decay) * reward

    def _role(self, scores: Scores, p: int, g: int) -> str:
        notes = None if scores.episodes is None else scores.episodes[p][g]
        pair = (None if scores.slices is None else scores.slices[p], None if notes is None else notes.role)
        return "/".join(name for name in pair if name is not None) or _ALL
