"""Target policy optimization: the policy is fitted by cross-entropy to a target distribution over each group's completions.

Kaddour 2026, "Target Policy Optimization", <https://arxiv.org/abs/2604.06159>.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from covey.algorithms.composing import NO_TOTALS, compared
from covey.declared import Positive, checked_dataclass
from covey.types import TokenBatch, Totals


@dataclass(frozen=True)
class Normalizers:
    """Denominators of the softmax over one group, as logarithms, and the number of its completions."""

    now: float
    """Of the completions' probabilities under the policy now."""
    target: float
    """Of `p_old exp(A / temperature)`."""
    size: int


@checked_dataclass(frozen=True)
class TargetPolicy:
    """Cross-entropy of a group's completions to `q ∝ p_old exp(A / temperature)`: `-sum_i q_i log p_i`.

    `p` is the softmax over the group of the completions' log-probabilities, now (`p`) and at the rollout (`p_old`): their sums
    over tokens (`level="product"`, the paper's), or their means (`"sequence"`), which does not favour short completions. The
    gradient is `p_i - q_i` on each, so it ends where the policy is the target. The value is `(p_i - q_i) logp_i` times the
    group's size, of the same gradient as a mean over prompts under `SequenceSum`. Completions of a group may lie in several
    micro-batches: `prepare` takes the sums from the whole optimizer step; unprepared, the batch at hand is the step. A completion
    without a token that counts (truncated and masked), or that nobody scored, is in no sum.
    """

    temperature: Positive = 1.0
    level: Literal["product", "sequence"] = "product"
    groups: Mapping[int, Normalizers] | None = None
    """By the number of the prompt, set by `prepare`."""
    exempt: ClassVar[tuple[str, ...]] = ("policy_gradient", "zero_advantage")

    def __call__(self, tokens: TokenBatch) -> Tensor:
        logp = tokens.logp if self.level == "product" else tokens.logp / tokens.lengths
        return self.pull(tokens) * logp

    def prepare(self, tokens: TokenBatch, totals: Totals) -> TargetPolicy:
        """The objective with the sums of every group of the whole step."""
        now, target = self._scores(tokens)
        groups = {
            int(group): Normalizers(now[rows].logsumexp(0).item(), target[rows].logsumexp(0).item(), int(rows.sum()))
            for group in tokens.group.unique()
            for rows in (tokens.group == group,)
        }
        return replace(self, groups=groups)

    def pull(self, tokens: TokenBatch) -> Tensor:
        """[N, 1], `p_i - q_i` of each completion times the size of its group, without gradient."""
        groups = self.groups or self.prepare(tokens, NO_TOTALS).groups
        assert groups is not None  # prepare sets it
        now, target = self._scores(tokens)
        mine = [groups[group] for group in tokens.group.tolist()]
        sums = now.new_tensor([[item.now, item.target, item.size] for item in mine]).reshape(-1, 3)
        pull = sums[:, 2] * ((now - sums[:, 0]).exp() - (target - sums[:, 1]).exp())
        return torch.where(compared(tokens), pull, 0.0)[:, None]

    def _scores(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """[N] each: the completions' log-probability now, and of the target, both before the softmax; -inf of those in no sum."""
        now, old = (
            torch.where(tokens.mask, logp.detach(), 0.0).sum(-1)
            / (1 if self.level == "product" else tokens.lengths[:, 0])
            for logp in (tokens.logp, tokens.old_logp)
        )
        advantage = tokens.advantages
        advantage = advantage if advantage.shape[-1] == 1 else tokens.per_sequence(advantage)
        absent, target = ~compared(tokens), old + advantage[:, 0] / self.temperature
        return now.masked_fill(absent, -torch.inf), target.masked_fill(absent, -torch.inf)
