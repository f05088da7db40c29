"""Rewards as labels (REAL): each group is a classification of its completions, right ones up and wrong ones down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from covey.algorithms.composing import NO_TOTALS, compared
from covey.declared import Positive, checked_dataclass
from covey.types import TokenBatch, Totals


@dataclass(frozen=True)
class Margins:
    """Of one group: `log(1 + sum exp(-s / tau))` over its positive completions, the same of `s` over the others, and its size."""

    positive: float
    negative: float
    size: int
    is_mixed: bool
    """True if the group has both; others teach nothing."""


@checked_dataclass(frozen=True)
class RewardsAsLabels:
    """`log(1 + sum_{A > 0} exp(-s / tau)) + log(1 + sum_{A <= 0} exp(s / tau))` of each group, `s` the mean log-ratio of a completion.

    A completion's gradient is at most `1 / tau`, whatever its log-ratio, and no advantage scales it. The value is the gradient's
    factor times `s`, times the group's size, so that it is a mean over prompts under `SequenceMean`. Completions of a group may lie
    in several micro-batches: `prepare` takes the sums from the whole optimizer step. A completion without a token that counts, or
    that nobody scored, is in no sum. "Rewards as Labels: Revisiting RLVR
    from a Classification Perspective", 2026, <https://arxiv.org/abs/2602.05630>; `temperature` is its tau.
    """

    temperature: Positive = 0.5
    groups: Mapping[int, Margins] | None = None
    """By the number of the prompt, set by `prepare`."""
    exempt: ClassVar[tuple[str, ...]] = ("policy_gradient", "zero_advantage")

    def __call__(self, tokens: TokenBatch) -> Tensor:
        return self.pull(tokens) * tokens.log_ratio

    def prepare(self, tokens: TokenBatch, totals: Totals) -> RewardsAsLabels:
        """The objective with the sums of every group of the whole step."""
        score, is_positive = self._scores(tokens)
        takes_part = compared(tokens)
        groups = {}
        for group in tokens.group.unique().tolist():
            rows = tokens.group == group
            high, low = -score[rows & takes_part & is_positive], score[rows & takes_part & ~is_positive]
            zero = score.new_zeros(1)
            sums = [torch.cat([zero, part]).logsumexp(0).item() for part in (high, low)]
            groups[group] = Margins(sums[0], sums[1], int(rows.sum()), len(high) > 0 and len(low) > 0)
        return replace(self, groups=groups)

    def pull(self, tokens: TokenBatch) -> Tensor:
        """[N, 1], derivative of the group's loss by each completion's `s`, times the group's size, without gradient."""
        groups = self.groups or self.prepare(tokens, NO_TOTALS).groups
        assert groups is not None  # prepare sets it
        score, is_positive = self._scores(tokens)
        mine = [groups[group] for group in tokens.group.tolist()]
        sums = score.new_tensor([[group.positive, group.negative, group.size * group.is_mixed] for group in mine])
        sums = sums.reshape(-1, 3)
        factor = torch.where(is_positive, -(-score - sums[:, 0]).exp(), (score - sums[:, 1]).exp())
        return torch.where(compared(tokens), sums[:, 2] * factor / self.temperature, 0.0)[:, None]

    def _scores(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """[N] each: `s / tau` of a completion, and True where its advantage is above 0."""
        score = tokens.per_sequence(tokens.log_ratio.detach())[:, 0] / self.temperature
        advantage = tokens.advantages
        advantage = advantage if advantage.shape[-1] == 1 else tokens.per_sequence(advantage)
        return score, advantage[:, 0] > 0
