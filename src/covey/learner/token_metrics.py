"""Metrics of single tokens: entropies, and the distance of the policy from the one that wrote the tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from covey.algorithms import Algorithm
from covey.learner.packing import Row
from covey.process.world import World
from covey.types import EffectiveSize, Group, Max, Mean, Metric, Sum, TokenBatch, TokenNumbers, Totals

FIRST_UPDATE = "first_update/log_ratio"
"""Mean distance, a token, of the log-probabilities of a rollout's first update from those measured at the rollout."""


def sampler_mismatch(tokens: TokenBatch) -> dict[str, Metric]:
    """Distance of the sampler's log-probabilities from the learner's: 0 for the same weights in the same arithmetic."""
    if tokens.sampler_logp is None:
        return {}
    known = tokens.mask & ~tokens.sampler_logp.isnan()
    gap = (tokens.old_logp - tokens.sampler_logp.nan_to_num(0.0)).abs()
    largest = gap[known].max().item() if bool(known.any()) else math.nan
    return {
        "sampling/sampling_logp_difference/mean": Mean.of(gap, known),
        "sampling/sampling_logp_difference/max": Max(largest),
    }


def effective_size(tokens: TokenBatch) -> dict[str, Metric]:
    """Effective sample size of the tokens, each weighed by the policy now over the one that drew it: 1 on-policy."""
    drawn = tokens.old_logp if tokens.sampler_logp is None else tokens.sampler_logp
    known = tokens.mask & ~drawn.isnan()
    ratio = (tokens.logp.detach() - drawn)[known].clamp(-20.0, 20.0).exp()
    return {"sampling/effective_sample_size": EffectiveSize.of(ratio)}


class TokenEntropies:
    """Entropies of the tokens of a step, on the processor, as the policy that made the gradient had them."""

    def __init__(self, is_wanted: Callable[[int], bool] = lambda step: False) -> None:
        """`is_wanted(step)` must say the same on every process."""
        self.is_wanted = is_wanted
        self._rows: dict[int, Tensor] | None = None

    def begin(self, step: int) -> None:
        self._rows = {} if self.is_wanted(step) else None

    def take(self, batch: Sequence[Row], entropy: Tensor) -> None:
        """`entropy` [N, T] of a micro-batch, in nats; again for the same completions, when a step is taken again."""
        if self._rows is not None:
            numbers = entropy.detach().float().cpu()
            self._rows |= {row.index: numbers[r, : row.completion.num_tokens].clone() for r, row in enumerate(batch)}

    def gathered(self, world: World, groups: Sequence[Group]) -> TokenNumbers:
        """Entropies of all processes. Completions without a gradient are often not computed, and have none."""
        if self._rows is None:
            return {}
        found = {index: row for part in world.gather([self._rows]) for rows in part for index, row in rows.items()}
        self._rows = None
        ends = [sum(group.size for group in groups[: p + 1]) for p in range(len(groups))]
        places = [range(end - group.size, end) for end, group in zip(ends, groups, strict=True)]
        return {"entropy": [[found.get(index) for index in place] for place in places]}


@dataclass(frozen=True, eq=False)
class Unread:
    """Tensors that the metrics of a micro-batch are computed from, still on the device."""

    batch: Sequence[Row]
    tokens: TokenBatch
    """Detached."""
    losses: Mapping[str, Tensor]
    """[] each, detached."""


def metrics_of(unread: Unread, algorithm: Algorithm, totals: Totals, entropies: TokenEntropies) -> dict[str, Metric]:
    """The metrics of a micro-batch, and its entropies into `entropies`: here the host waits for the device."""
    tokens, losses = unread.tokens, {name: part.item() for name, part in unread.losses.items()}
    if tokens.entropy is not None:
        entropies.take(unread.batch, tokens.entropy)
    metrics: dict[str, Metric] = dict(algorithm.metrics(tokens, totals))
    if "value_loss" in losses:
        metrics["value_loss"] = Sum(losses["value_loss"])
    if "aux_loss" in losses:
        metrics["aux_loss"] = Mean(losses["aux_loss"] * len(unread.batch), len(unread.batch))
    metrics["loss"] = Sum(losses["loss"])
    gap = (tokens.logp - tokens.old_logp).abs()
    metrics[FIRST_UPDATE] = Mean.of(gap, tokens.mask)
    return metrics | sampler_mismatch(tokens) | effective_size(tokens)
