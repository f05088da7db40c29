"""Objectives that single out tokens whose advantage and log-probability move together: they drive the entropy down.

Both need statistics of the whole optimizer step, which `prepare` takes; unprepared, the batch at hand is the step.
Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from covey.algorithms.composing import NO_TOTALS, masked_mean
from covey.algorithms.ratios import ratio_of
from covey.declared import Bound, Finite, Measured, Share, checked_dataclass
from covey.types import TokenBatch, Totals, precise, widest_float


@dataclass(frozen=True)
class Covariance:
    """Means of a whole step, and the bound that its selection came to."""

    mean_advantage: Measured
    mean_logp: Measured
    bound: Measured
    tie: Measured = math.inf
    """Priority up to which tokens at the bound itself are selected."""

    def of(self, tokens: TokenBatch) -> Tensor:
        """[N, T], `(A - mean A)(logp - mean logp)`, without gradient."""
        return (tokens.advantages - self.mean_advantage) * (tokens.logp.detach() - self.mean_logp)

    @staticmethod
    def means(tokens: TokenBatch) -> Covariance:
        """Means over the tokens that count; no bound yet."""
        advantages = tokens.advantages.expand_as(tokens.mask)
        mean_advantage = masked_mean(advantages, tokens.mask).item()
        return Covariance(mean_advantage, masked_mean(tokens.logp.detach(), tokens.mask).item(), math.nan)


@checked_dataclass(frozen=True)
class ClipCov:
    """The clipped surrogate without a few tokens of high covariance, drawn at random: `-min(r A, clip(r) A) keep`.

    Candidates count, are not on the clipped branch, and have `lower < cov < upper`; of them up to
    `max(int(share * tokens), 1)` get `keep = 0`. The draw is a hash of a token's place in the step, so no split and no process
    changes it.
    """

    low: Bound = 0.2
    high: Bound = 0.2
    share: Share = 2e-4
    lower: float = 1.0
    upper: float = 5.0
    measured: Covariance | None = None
    exempt: ClassVar[tuple[str, ...]] = ("policy_gradient",)
    scales_with_advantage = True

    def __call__(self, tokens: TokenBatch) -> Tensor:
        plain, clipped = self._branches(tokens)
        return torch.where(self._is_dropped(tokens), 0.0, torch.maximum(plain, clipped))

    def prepare(self, tokens: TokenBatch, totals: Totals) -> ClipCov:
        """The objective with the means and the random draw of the whole step."""
        means = Covariance.means(tokens)
        priorities = _priority(tokens)[self._candidates(tokens, means)]
        count = max(int(self.share * int(tokens.mask.sum())), 1)
        if priorities.numel() <= count:
            return replace(self, measured=replace(means, bound=math.inf))
        return replace(self, measured=replace(means, bound=priorities.sort().values[count - 1].item()))

    def metrics(self, tokens: TokenBatch) -> dict[str, Tensor]:
        """`clip_ratio/cov_mean`: tokens that lost their gradient for their covariance."""
        return {"clip_ratio/cov_mean": self._is_dropped(tokens)}

    def _branches(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        ratio = ratio_of(tokens)
        return -tokens.advantages * ratio, -tokens.advantages * ratio.clamp(1 - self.low, 1 + self.high)

    def _candidates(self, tokens: TokenBatch, means: Covariance) -> Tensor:
        plain, clipped = self._branches(tokens)
        cov = means.of(tokens)
        return tokens.mask & ~(clipped > plain) & (cov > self.lower) & (cov < self.upper)

    def _is_dropped(self, tokens: TokenBatch) -> Tensor:
        measured = self.measured or self.prepare(tokens, NO_TOTALS).measured
        assert measured is not None  # prepare sets it
        return self._candidates(tokens, measured) & (_priority(tokens) <= measured.bound)


@checked_dataclass(frozen=True)
class KLCov:
    """`-r A`, unclipped; the `max(1, int(share * tokens))` tokens of highest covariance pay `coefficient |d|` on top."""

    share: Share = 2e-4
    coefficient: Finite = 1.0
    measured: Covariance | None = None
    exempt: ClassVar[tuple[str, ...]] = ("zero_advantage",)

    def __call__(self, tokens: TokenBatch) -> Tensor:
        loss = -tokens.advantages * ratio_of(tokens)
        return torch.where(self._is_held(tokens), loss + self.coefficient * tokens.log_ratio.abs(), loss)

    def prepare(self, tokens: TokenBatch, totals: Totals) -> KLCov:
        """The objective with the means and the selection of the whole step."""
        means = Covariance.means(tokens)
        values = means.of(tokens)[tokens.mask]
        count = min(max(1, int(self.share * values.numel())), values.numel())
        if not count or bool(values.isnan().any()):  # NaN reaches the loss, which the guard judges
            return replace(self, measured=replace(means, bound=math.inf))
        bound = values.sort(descending=True).values[count - 1].item()
        ties = _priority(tokens)[tokens.mask][values == bound].sort().values  # such as all tokens of tied groups
        tie = ties[count - int((values > bound).sum()) - 1].item()
        return replace(self, measured=replace(means, bound=bound, tie=tie))

    def metrics(self, tokens: TokenBatch) -> dict[str, Tensor]:
        """`kl_cov/held_mean`: tokens that pay for their covariance."""
        return {"kl_cov/held_mean": self._is_held(tokens)}

    def _is_held(self, tokens: TokenBatch) -> Tensor:
        measured = self.measured or self.prepare(tokens, NO_TOTALS).measured
        assert measured is not None  # prepare sets it
        values, is_first = measured.of(tokens), _priority(tokens) <= measured.tie
        return tokens.mask & ((values > measured.bound) | ((values == measured.bound) & is_first))


def _priority(tokens: TokenBatch) -> Tensor:
    """[N, T] in [0, 1), as good as random, the same for the same token of the same completion of a step.

    By place where the rows are numbered, so that the last bit of a log-probability, which may change with the
    micro-batch, decides nothing; by the token's own numbers otherwise.
    """
    if tokens.row is None:
        key = precise(tokens.old_logp) * 12.9898 + precise(tokens.advantages) * 78.233
    else:
        steps = torch.arange(tokens.mask.shape[1], device=tokens.mask.device, dtype=widest_float(tokens.mask.device))
        key = precise(tokens.row)[:, None] * 12.9898 + steps * 78.233
    mixed = torch.sin(key) * 43758.5453
    return mixed - mixed.floor()
