"""Per-token metrics: entropies, and the mismatch of learner and sampler."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from covey.algorithms import Algorithm
from covey.algorithms.teacher_signals import gap_of_tokens
from covey.learner.packing import Row
from covey.process.world import World
from covey.types import EffectiveSize, Group, Max, Mean, Metric, Sum, TokenBatch, TokenNumbers, Totals

FIRST_UPDATE = "first_update/log_ratio"
"""Metric name: mean absolute difference per token of log-probabilities between a rollout's first update and the rollout."""


def sampler_mismatch(tokens: TokenBatch) -> dict[str, Metric]:
    """Differences of the sampler's and the learner's log-probabilities: 0 for the same weights in the same arithmetic."""
    if tokens.sampler_logp is None:
        return {}
    compared = tokens.mask & ~tokens.sampler_logp.isnan()
    gap = (tokens.old_logp - tokens.sampler_logp.nan_to_num(0.0)).abs()
    largest = gap[compared].max().item() if bool(compared.any()) else math.nan
    return {
        "sampling/sampling_logp_difference/mean": Mean.of(gap, compared),
        "sampling/sampling_logp_difference/max": Max(largest),
    }


def effective_size(tokens: TokenBatch) -> dict[str, Metric]:
    """Effective sample size of the tokens under importance weights (current over sampling policy), as a fraction: 1 on-policy."""
    drawn = tokens.old_logp if tokens.sampler_logp is None else tokens.sampler_logp
    compared = tokens.mask & ~drawn.isnan()
    ratio = (tokens.logp.detach() - drawn)[compared].clamp(-20.0, 20.0).exp()
    return {"sampling/effective_sample_size": EffectiveSize.of(ratio)}


class TokenEntropies:
    """Numbers of single tokens of a step, on the CPU, from the forward pass of the gradient; kept only for logged steps.

    `entropy` in nats, and where a teacher says something `teacher_gap`, `log q - log p`; that of a span of text is shared out over its
    tokens, and NaN stands where none is aligned.
    """

    def __init__(self, is_due: Callable[[int], bool] = lambda step: False) -> None:
        """`is_due(step)` must return the same on every process."""
        self.is_due = is_due
        self._rows: dict[str, dict[int, Tensor]] | None = None

    def begin(self, step: int) -> None:
        self._rows = {"entropy": {}} if self.is_due(step) else None

    def take(self, batch: Sequence[Row], tokens: TokenBatch) -> None:
        """Store the numbers [N, T] of a micro-batch; a repeated step overwrites."""
        if self._rows is None:
            return
        gap = None if tokens.teacher_logp is None else gap_of_tokens(tokens)
        if gap is not None and tokens.teacher_span is not None:
            gap = gap.masked_fill(tokens.teacher_span == 0, math.nan)
        for name, values in (("entropy", tokens.entropy), ("teacher_gap", gap)):
            if values is None:
                continue
            numbers = values.detach().float().cpu()
            rows = {row.index: numbers[r, : row.completion.num_tokens].clone() for r, row in enumerate(batch)}
            self._rows.setdefault(name, {}).update(rows)

    def gathered(self, world: World, groups: Sequence[Group]) -> TokenNumbers:
        """Numbers of all processes. Completions without gradient may lack them: their forward pass is often skipped."""
        if self._rows is None:
            return {}
        parts = [rows for part in world.gather([self._rows]) for rows in part]
        self._rows = None
        ends = [sum(group.size for group in groups[: p + 1]) for p in range(len(groups))]
        places = [range(end - group.size, end) for end, group in zip(ends, groups, strict=True)]
        named: TokenNumbers = {}
        for name in dict.fromkeys(name for part in parts for name in part):
            by_row = {index: row for part in parts for index, row in part.get(name, {}).items()}
            named = {**named, name: [[by_row.get(index) for index in place] for place in places]}
        return named


@dataclass(frozen=True, eq=False)
class Unread:
    """Inputs of a micro-batch's metrics, still on the device."""

    batch: Sequence[Row]
    tokens: TokenBatch
    """Token batch, detached."""
    losses: Mapping[str, Tensor]
    """Scalar losses by name, detached."""


def metrics_of(unread: Unread, algorithm: Algorithm, totals: Totals, entropies: TokenEntropies) -> dict[str, Metric]:
    """Metrics of a micro-batch; stores its entropies in `entropies`. Synchronizes host and device."""
    tokens, losses = unread.tokens, {name: part.item() for name, part in unread.losses.items()}
    entropies.take(unread.batch, tokens)
    metrics: dict[str, Metric] = dict(algorithm.metrics(tokens, totals))
    if "value_loss" in losses:
        metrics["value_loss"] = Sum(losses["value_loss"])
    if "aux_loss" in losses:
        metrics["aux_loss"] = Sum(losses["aux_loss"])
    for name in ("experts/max_load", "experts/entropy", "experts/changed"):
        if name in losses:
            metrics[name] = Mean(losses[name] * len(unread.batch), len(unread.batch))
    metrics["loss"] = Sum(losses["loss"])
    gap = (tokens.logp - tokens.old_logp).abs()
    metrics[FIRST_UPDATE] = Mean.of(gap, tokens.mask)
    return metrics | sampler_mismatch(tokens) | effective_size(tokens)
