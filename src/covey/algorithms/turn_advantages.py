"""Advantages of turns, `[P, G, T]`: how much better a turn is than other turns that the group took in the same state."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from covey.algorithms.advantages import GroupNormalized, is_tied, nan_std, sequence_rewards
from covey.declared import Finite, NotNegative, Share, checked_dataclass
from covey.types import EpisodeNotes, Scores


@checked_dataclass(frozen=True)
class GiGPO:
    """`A = A_episode + weight A_step`: the completion's advantage, and each turn's within the turns that began in the same state.

    `A_step = (R - mean) / (sd + epsilon)` over the turns of a group whose `EpisodeNotes.states` are equal, `R` a turn's discounted
    return; `scale="none"` does not divide, in both parts. A turn whose state nobody else saw has `A_step` 0. Rewards of turns are
    `EpisodeNotes.rewards`; what the completion's reward has beyond their sum belongs to its last turn. A completion without
    turns, or that nobody scored, has its episode's part alone. Feng et al. 2025, "Group-in-Group Policy Optimization for LLM Agent
    Training", section 4, <https://arxiv.org/abs/2505.10978>.
    """

    weight: Finite = 1.0
    gamma: Share = 0.95
    scale: Literal["group", "none"] = "group"
    epsilon: NotNegative = 1e-4

    def __call__(self, scores: Scores) -> Tensor:
        episode = GroupNormalized(self.scale, self.epsilon)(scores)  # [P, G]
        out = episode.unsqueeze(-1) * scores.mask  # [P, G, T]
        if scores.episodes is None:
            return out
        rewards = sequence_rewards(scores)
        for p, notes in enumerate(scores.episodes):
            turns = turns_of(scores.mask[p], None if scores.observed is None else scores.observed[p])
            for (g, turn), advantage in self._steps(notes, rewards[p], turns).items():
                out[p, g] += self.weight * advantage * (turns[g] == turn)
        return out

    def _steps(
        self, notes: Sequence[EpisodeNotes | None], rewards: Tensor, turns: Tensor
    ) -> dict[tuple[int, int], float]:
        """`A_step` by (completion, turn) of one group, whose tokens are in `turns` [G, T]."""
        states: dict[str, list[tuple[tuple[int, int], float]]] = defaultdict(list)
        for g, note in enumerate(notes):
            if note is None or not note.states or bool(rewards[g].isnan()):
                continue
            count = min(len(note.states), int(turns[g].amax()) + 1 if turns.shape[-1] else 0)
            for turn, value in enumerate(returns_of(note.rewards[:count], float(rewards[g]), count, self.gamma)):
                states[note.states[turn]].append(((g, turn), value))
        steps = dict[tuple[int, int], float]()
        for members in states.values():
            values = torch.tensor([[value for _, value in members]], dtype=rewards.dtype)
            apart = torch.zeros_like(values) if bool(is_tied(values)) else values - values.mean()
            if self.scale == "group":
                apart = apart / (nan_std(values) + self.epsilon)
            steps.update(zip((place for place, _ in members), apart[0].tolist(), strict=True))
        return steps


def turns_of(mask: Tensor, observed: Tensor | None = None) -> Tensor:
    """[..., T] int64, which turn a token of `mask` [..., T] is in, counted from 0; -1 where it is False.

    A turn ends where `observed` [..., T] is True; None: where `mask` is False.
    """
    ends = ~mask if observed is None else observed
    starts = ends & ~torch.nn.functional.pad(ends, (1, 0))[..., :-1]
    turns = torch.where(mask, starts.cumsum(-1), mask.shape[-1] + 1)
    first = turns.amin(-1, keepdim=True) if mask.shape[-1] else turns
    return torch.where(mask, turns - first, -1)


def returns_of(rewards: Sequence[float], total: float, count: int, gamma: float) -> list[float]:
    """Discounted return of each of `count` turns: `R_t = r_t + gamma R_(t+1)`; the last has what `total` has beyond `rewards`."""
    each = [*rewards, *([0.0] * (count - len(rewards)))]
    later, returns = 0.0, list[float]()
    for turn in reversed(range(count)):
        rest = total - sum(each) if turn == count - 1 else 0.0
        later = each[turn] + rest + gamma * later
        returns.append(later)
    return returns[::-1]
