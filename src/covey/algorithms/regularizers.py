"""Terms added to the objective: an entropy bonus, fixed or adaptive, and the choice of tokens by their entropy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from covey.algorithms.composing import needs_whole_step, prepared
from covey.algorithms.control import Controller, current
from covey.declared import Finite, Measured, NotNegative, Positive, Share, checked_dataclass
from covey.types import Aggregate, Last, Mean, Metric, StepReport, TokenBatch, Totals

_ROUNDING = 1e-6
"""Error of an entropy in float32, relative to 1 and to itself."""


@checked_dataclass(frozen=True)
class TopEntropy:
    """1 on the share of tokens with the highest entropy, else 0: a weight. Wang et al. 2025, "Beyond the 80/20 Rule".

    The bound is the `1 - share` quantile (linear between order statistics) of the entropies of all tokens of the optimizer
    step that count; `prepare` measures it. Entropies that differ from it by rounding are in: first tokens of a group are equal, and
    a micro-batch's last bit would tell them apart. Denominators do not change.
    """

    share: Share = 0.2
    bound: Measured | None = None
    needs: ClassVar[tuple[str, ...]] = ("entropy",)

    def __call__(self, tokens: TokenBatch) -> Tensor:
        bound = self._measure(tokens) if self.bound is None else self.bound
        tied = _ROUNDING * (1.0 + abs(bound)) if math.isfinite(bound) else 0.0
        return (tokens.mask & (entropy_of(tokens).detach() >= bound - tied)).to(tokens.logp.dtype)

    def prepare(self, tokens: TokenBatch, totals: Totals) -> TopEntropy:
        """With the bound of the whole step."""
        return replace(self, bound=self._measure(tokens))

    def _measure(self, tokens: TokenBatch) -> float:
        values = entropy_of(tokens).detach()[tokens.mask]
        if not values.numel():
            return -math.inf
        # torch.quantile refuses more than 2**24 values, which one step can have
        place = (1.0 - self.share) * (values.numel() - 1)
        low = min(math.floor(place), values.numel() - 1)
        ordered = values.sort().values
        high = ordered[min(low + 1, values.numel() - 1)]
        return torch.lerp(ordered[low], high, place - low).item()


@checked_dataclass(frozen=True)
class EntropyBonus:
    """`-coefficient x entropy` of each token: rewards staying undecided. Williams and Peng 1991.

    `coefficient` may be a controller, such as `AdaptiveEntropy`. `only` restricts it to the tokens of a 0/1 weight and divides
    by their number. `aggregate=None` means the algorithm's own; TRL takes `token_mean` for every loss.
    """

    coefficient: Finite | Controller = 0.01
    only: TopEntropy | None = None
    aggregate: Aggregate | None = None
    scale: Measured | None = None
    """Tokens that count per token that `only` selects, once `prepare` has counted the step."""
    needs: ClassVar[tuple[str, ...]] = ("entropy",)

    def __call__(self, tokens: TokenBatch) -> Tensor:
        bonus = -current(self.coefficient) * entropy_of(tokens)
        if self.only is None:
            return bonus
        selected = self.only(tokens)
        scale = _tokens_per_selected(tokens, selected) if self.scale is None else self.scale
        return bonus * selected * scale

    @property
    def is_stepwise(self) -> bool:
        return needs_whole_step(self.only)

    def prepare(self, tokens: TokenBatch, totals: Totals) -> EntropyBonus:
        """With the selection of the whole step."""
        if self.only is None:
            return self
        only = prepared(self.only, tokens, totals)
        return replace(self, only=only, scale=_tokens_per_selected(tokens, only(tokens)))

    def metrics(self, tokens: TokenBatch) -> dict[str, Metric]:
        """`entropy_coef`: the coefficient applied; with `only`, `entropy_selected`: the mean entropy of those tokens."""
        metrics: dict[str, Metric] = {"entropy_coef": Last(current(self.coefficient))}
        if self.only is not None:
            metrics["entropy_selected"] = Mean.of(entropy_of(tokens), self.only(tokens).bool())
        return metrics


def _tokens_per_selected(tokens: TokenBatch, selected: Tensor) -> float:
    return int(tokens.mask.sum()) / max(int(selected.sum()), 1)


def entropy_bonus(coefficient: float | Controller) -> EntropyBonus:
    """The bonus as a regularizer: `alg.grpo().replace(regularizers=(alg.entropy_bonus(0.01),))`."""
    return EntropyBonus(coefficient)


@checked_dataclass(frozen=True)
class Echo:
    """`weight x` the mean `-log p` of the tokens with which tools and environments answered: the model learns to predict them.

    The mean is over all such tokens of the step. Log-probabilities are those of the policy gradient, at its temperature. Shrivastava
    et al. 2026, "ECHO: Terminal Agents Learn World Models for Free", <https://arxiv.org/abs/2605.24517>; the weight is prime-rl's.
    """

    weight: Positive = 0.1
    needs: ClassVar[tuple[str, ...]] = ("observed",)

    def __call__(self, tokens: TokenBatch) -> Tensor:
        return -self.weight * _observed(tokens)[1]

    def aggregate(self, per_token: Tensor, tokens: TokenBatch, totals: Totals) -> Tensor:
        return per_token.sum() / max(totals.observed, 1)

    def metrics(self, tokens: TokenBatch) -> dict[str, Metric]:
        """`echo/loss`: the mean `-log p` of these tokens."""
        observed, logp = _observed(tokens)
        return {"echo/loss": Mean.of(-logp, observed)}


def _observed(tokens: TokenBatch) -> tuple[Tensor, Tensor]:
    """[N, T] both. Raises ValueError where the batch does not say what was observed."""
    if tokens.observed is None or tokens.observed_logp is None:
        raise ValueError("This part reads the answers of tools and environments; this batch has none.")
    return tokens.observed, tokens.observed_logp


@checked_dataclass(frozen=True)
class AdaptiveEntropy:
    """An entropy coefficient that rises by `delta` after a step whose entropy was at most `target`, and falls otherwise.

    Within `[low, high]`. It is applied only after such a step, and not on the first one: Skywork-OR1, He et al. 2025; as in
    TRL. Its memory is one float, negative while it is not applied.
    """

    target: Finite = 0.2
    start: NotNegative = 0.0
    delta: NotNegative = 0.005
    low: Finite = 0.0
    high: Finite = 1.0
    metric: str = "entropy"

    def init(self) -> float:
        return -self.start

    def update(self, value: float, report: StepReport) -> float:
        entropy = report[self.metric]
        if entropy != entropy:
            return value
        is_low = entropy <= self.target
        moved = abs(value) + (self.delta if is_low else -self.delta)
        moved = min(max(moved, self.low), self.high)
        return moved if is_low else -moved

    def applied(self, value: float) -> float:
        return max(value, 0.0)


def entropy_of(tokens: TokenBatch) -> Tensor:
    """[N, T]. Raises ValueError where the batch has none."""
    if tokens.entropy is None:
        raise ValueError("This part reads the entropy of each token; this batch has none.")
    return tokens.entropy
