"""Token tensors of a micro-batch for an algorithm, and the denominators of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covey.learner.measured import Measured
from covey.learner.packing import Row
from covey.process.device import onto
from covey.types import Completion, TokenBatch, Totals, over_spans

CPU = torch.device("cpu")


def totals_of(rows: Sequence[Row], max_length: int) -> Totals:
    """Denominators of the step, counted on the host: every process holds all rows, so the counts agree."""
    counts = [int(row.counts.sum()) for row in rows]
    by_prompt: dict[int, int] = {}
    for row, count in zip(rows, counts, strict=True):
        by_prompt[row.group] = by_prompt.get(row.group, 0) + count
    return Totals(
        tokens=sum(counts),
        sequences=len(rows),
        nonempty_sequences=sum(count > 0 for count in counts),
        prompts=len({row.group for row in rows}),
        max_length=max_length,
        observed=sum(int(row.observed.sum()) for row in rows if row.observed is not None),
        tokens_by_prompt=by_prompt,
    )


def as_drawn(rows: Sequence[Row]) -> TokenBatch:
    """Token batch of completions without gradient from the sampler's log-probabilities; on-policy, with `-log p` as entropy.

    The estimate is unbiased: E[-log p] = H(p) for a token drawn from p.
    """
    shape = torch.Size([len(rows), max(row.completion.num_tokens for row in rows)])
    logp = spread([row.completion.logprobs for row in rows], shape, CPU, 0.0)
    return TokenBatch(
        logp=logp,
        old_logp=logp,
        advantages=torch.zeros(len(rows), 1),
        mask=spread([row.counts for row in rows], shape, CPU, False),
        group=torch.tensor([row.group for row in rows]),
        entropy=-logp,
    )


@dataclass(frozen=True)
class Draws:
    """Path of the completions to the learner, as in its fields of the same names, and what is read of them."""

    uses_sampler_logp: bool = True
    samples_here: bool = False
    has_observations: bool = False
    """True if a part learns from what tools and environments answered."""


def batch_of(rows: Sequence[Row], measured: Measured, values: Tensor | None, draws: Draws) -> TokenBatch:
    """Padded tensors [N, T] of measured rows, with the critic's `values`, if there are any."""
    device, shape = measured.logp.device, measured.logp.shape
    padded = lambda values, fill=0.0: spread(values, shape, device, fill)
    completions = [row.completion for row in rows]
    old = [completion.old_logp for completion in completions]
    drawn = drawn_of(completions) if draws.uses_sampler_logp else None
    ref = [completion.ref_logp for completion in completions]
    has_values = all(completion.values is not None for completion in completions)
    old_logp = measured.logp.detach() if any(x is None for x in old) else padded(old)
    counts = padded([row.counts for row in rows], False)
    span = whole_spans(measured.teacher_span, counts)
    observed = padded([_observed(row) for row in rows], False) if draws.has_observations else None
    return TokenBatch(
        logp=measured.logp,
        old_logp=old_logp,
        advantages=advantages(rows, shape, device),
        weight=weights(rows, shape, device),
        mask=counts,
        group=onto(device, torch.tensor([row.group for row in rows])),
        row=onto(device, torch.tensor([row.index for row in rows])),
        scored=onto(device, torch.tensor([row.is_scored for row in rows])),
        same_weights=same_weights(rows, device) if draws.samples_here else None,
        sampler_logp=None if drawn is None else padded(drawn),
        ref_logp=None if any(x is None for x in ref) else padded(ref),
        observed=observed,
        observed_logp=None if observed is None else torch.where(observed, measured.logp, 0.0),
        entropy=measured.entropy,
        full_kl=measured.distance,
        teacher_distance=measured.teacher_distance,
        teacher_weight=measured.teacher_weight,
        teacher_logp=by_span(measured.teacher_logp, old_logp, span),
        teacher_overlap=measured.teacher_overlap,
        teacher_span=span,
        teacher_mask=measured.teacher_mask,
        values=values,
        old_values=padded([completion.values for completion in completions]) if has_values else None,
        returns=padded([row.returns for row in rows]) if rows[0].returns is not None else None,
    )


def drawn_of(completions: Sequence[Completion]) -> list[Tensor] | None:
    """The sampler's log-probabilities of each completion, NaN for those that have none; None if none of them has any."""
    if all(completion.logprobs is None for completion in completions):
        return None
    unknown = lambda completion: torch.full((completion.num_tokens,), torch.nan)
    return [unknown(c) if c.logprobs is None else c.logprobs for c in completions]


def _observed(row: Row) -> Tensor:
    return torch.zeros_like(row.counts) if row.observed is None else row.observed


def whole_spans(span: Tensor | None, counts: Tensor) -> Tensor | None:
    """[N, T], the spans of which every token counts [N, T]; the others are not aligned."""
    if span is None:
        return None
    return torch.where(over_spans((~counts).double(), span) > 0, 0, span)


def by_span(teacher_logp: Tensor | None, old_logp: Tensor, span: Tensor | None) -> Tensor | None:
    """[N, T], log-probabilities with the gap of a whole span to `old_logp` at each of its tokens; the span's stands at its first token."""
    if teacher_logp is None or span is None:
        return teacher_logp
    return old_logp + over_spans(teacher_logp - old_logp, span)


def spread(values: Sequence[Any], shape: torch.Size, device: torch.device, fill: float | bool) -> Tensor:
    """[N, T] from one tensor a row, `fill` beyond each end."""
    out = torch.full(shape, fill, dtype=values[0].dtype)
    for i, value in enumerate(values):
        out[i, : value.shape[0]] = value
    return onto(device, out)


def advantages(batch: Sequence[Row], shape: torch.Size, device: torch.device) -> Tensor:
    """Advantages [N, 1], or [N, T] if they are per token."""
    if batch[0].advantage.ndim == 0:
        return onto(device, torch.stack([row.advantage for row in batch]).unsqueeze(-1))
    return spread([row.advantage for row in batch], shape, device, 0.0)


def weights(batch: Sequence[Row], shape: torch.Size, device: torch.device) -> Tensor | None:
    """Weights [N, T] of each token's objective; None if the policy wrote every completion."""
    per_row = [row.completion.weight for row in batch]
    if all(weight is None for weight in per_row):
        return None
    filled = [torch.ones(row.completion.num_tokens) if w is None else w for row, w in zip(batch, per_row, strict=True)]
    return spread(filled, shape, device, 1.0)


def same_weights(batch: Sequence[Row], device: torch.device) -> Tensor:
    """[N] bool, completions that the policy wrote from beginning to end with the weights of one step."""
    drawn = [row.completion for row in batch]
    return onto(
        device,
        torch.tensor(
            [
                completion.source == "policy" and completion.weight is None and not completion.versions
                for completion in drawn
            ]
        ),
    )


def moved(tokens: TokenBatch, device: torch.device | str) -> TokenBatch:
    """The batch on another device."""
    return TokenBatch(**{name: onto(torch.device(device), value) for name, value in tokens.tensors().items()})
