"""Policy objectives: the loss of each token, `[N, T]`, or of each sequence, `[N, 1]`. No component divides.

Letters: `d = logp - old_logp`, `r = exp(d)`, `A` the advantage, `sg` no gradient through it. Where a class has a `level`, the
ratio is that of the token, the sequence's geometric mean, or the sequence's product (see `ratios.py`).
"""

from typing import Annotated

import torch
from torch import Tensor

from covey.algorithms.composing import clip_metrics
from covey.algorithms.ratios import Level, ratio_of
from covey.declared import Bound, Limit, Range, checked_dataclass
from covey.types import Metric, TokenBatch


def policy_gradient(tokens: TokenBatch) -> Tensor:
    """REINFORCE: `-A logp`, no ratio. Williams 1992; the objective of GPG (Chu et al. 2025). [N, T]"""
    return -tokens.advantages * tokens.logp


policy_gradient.scales_with_advantage = True  # type: ignore[attr-defined]


@checked_dataclass(frozen=True)
class Clipped:
    """The clipped surrogate: `-min(r A, clip(r, 1 - low, 1 + high) A)`. PPO, Schulman et al. 2017, eq. 7.

    `high=None` is `low`; larger is DAPO's clip-higher. `delta` bounds the unclipped ratio from above, which matters where
    A < 0 (two-sided clipping, INTELLECT-2 2025). `dual` bounds the loss where A < 0 by `-dual A` (dual clip, Ye et al. 2020).
    `level="sequence"` is GSPO. `limit` clips the log-ratio to `+-limit` (verl: 20).
    """

    low: Bound = 0.2
    high: Bound | None = None
    delta: Limit | None = None
    dual: (
        Annotated[float, Range(above=1, may_be_infinite=True, why="Below, no token of A < 0 would learn on-policy.")]
        | None
    ) = None
    level: Level = "token"
    limit: Limit | None = None
    scales_with_advantage = True

    def __call__(self, tokens: TokenBatch) -> Tensor:
        loss = self._two_sided(tokens)
        if self.dual is None:
            return loss
        return torch.where(tokens.advantages < 0, torch.minimum(loss, -self.dual * tokens.advantages), loss)

    def metrics(self, tokens: TokenBatch) -> dict[str, Tensor | Metric]:
        """TRL's `clip_ratio/*`: tokens (sequences, above token level) outside of the range in the direction that is clipped.

        With `dual`, `clip_ratio/dual_mean`: where that bound acts.
        """
        ratio, _ = self._ratios(tokens)
        low = (ratio < 1 - self.low) & (tokens.advantages < 0)
        metrics = clip_metrics(low, (ratio > 1 + self._high) & (tokens.advantages > 0), tokens)
        if self.dual is not None:
            is_worse = self._two_sided(tokens) > -self.dual * tokens.advantages
            metrics["clip_ratio/dual_mean"] = is_worse & (tokens.advantages < 0)
        return metrics

    @property
    def _high(self) -> float:
        return self.low if self.high is None else self.high

    def _two_sided(self, tokens: TokenBatch) -> Tensor:
        ratio, clipped = self._ratios(tokens)
        return -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)

    def _ratios(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        ratio = ratio_of(tokens, self.level, self.limit)
        clipped = ratio.clamp(1 - self.low, 1 + self._high)
        return (ratio if self.delta is None else ratio.clamp(max=self.delta)), clipped
