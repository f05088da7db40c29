"""Other models at the policy's positions in one micro-batch: distances between the distributions, and the signals of teachers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from covey.learner.lm_head import chunk_for
from covey.learner.logprobs import Head, by_chunks
from covey.learner.packing import PaddedRows, pick_rows
from covey.learner.shared_prompt import SharedRows


@dataclass(frozen=True, eq=False)
class Other:
    """Hidden states of another model at the same positions, for a distance between the two distributions."""

    hidden: Tensor
    """[M, D], without gradient."""
    head: Head
    distance: Callable[[Tensor, Tensor], Tensor]
    """(logp [m, V], other's logp [m, V]) -> [m]"""
    overlap_k: int | None = None
    """Compare the k likeliest tokens of both as well."""


@dataclass(frozen=True, eq=False)
class Likeliest:
    """Top-k tokens of another model at the same positions, for a distance between the two distributions."""

    ids: Tensor
    """[M, k]"""
    logp: Tensor
    """[M, k], their log-probabilities; -inf: no token."""
    distance: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(logp [m, V], ids [m, k], their logp [m, k]) -> [m]"""
    overlap_k: int | None = None
    """Compare the k likeliest tokens of both as well."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """The policy's distributions and another model's at M positions."""

    distance: Tensor
    """[M], with gradient."""
    logp: Tensor | None = None
    """[M], the other model's log-probability of the targets; None of one that tells few tokens."""
    overlap: Tensor | None = None
    """[M], share of the k likeliest tokens that both have; None unless it was to be measured."""


@torch.no_grad()
def overlap_of(logp: Tensor, others: Tensor, k: int) -> Tensor:
    """[m], share of the policy's k likeliest tokens, by `logp` [m, V], among the other model's likeliest `others` [m, k]."""
    mine = logp.topk(min(k, logp.shape[-1]), -1).indices
    return (mine[:, :, None] == others[:, None, :]).any(-1).to(logp.dtype).mean(-1)


def compared(
    hidden: Tensor,
    head: Head,
    other: Other | Likeliest,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> Comparison:
    """Distance [M] of the tempered distribution after each of `hidden` [M, D] to the other model's, with gradient, and what else is
    measured of both distributions at `targets` [M].

    As in `score_tokens`, the logits of both exist for one chunk at a time. Vocabularies are cut to the smaller one.
    """
    if chunk is None and isinstance(head.project, nn.Linear):
        chunk = chunk_for(head.project.weight.shape[0], None, hidden.device)
    chunk = chunk or 1024
    empty = hidden.new_zeros(0, dtype=torch.float32)
    if isinstance(other, Likeliest):
        likeliest = other

        def to_likeliest(rows: Tensor, ids: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
            logp = torch.log_softmax(head.logits(rows) / temperature, -1)
            k = likeliest.overlap_k
            shared = logp.new_zeros(len(logp)) if k is None else overlap_of(logp, ids[:, :k], k)
            return likeliest.distance(logp, ids, theirs.to(logp.dtype)), shared

        pieces = by_chunks(to_likeliest, *(x.split(chunk) for x in (hidden, other.ids, other.logp)))
        apart, shared = zip(*pieces, strict=True) if pieces else ((empty,), (empty,))
        return Comparison(torch.cat(apart), None, None if other.overlap_k is None else torch.cat(shared))

    def to_other(rows: Tensor, other_rows: Tensor, row_targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mine = head.logits(rows)
        with torch.no_grad():
            theirs = other.head.logits(other_rows).to(mine.dtype)
            # models of one family pad their embeddings to different sizes
            width = min(mine.shape[-1], theirs.shape[-1])
            theirs = torch.log_softmax(theirs[:, :width] / temperature, -1)
            drawn = theirs.gather(-1, row_targets.clamp(max=width - 1)[:, None]).squeeze(-1)
        logp, k = torch.log_softmax(mine[:, :width] / temperature, -1), other.overlap_k
        shared = drawn if k is None else overlap_of(logp, theirs.topk(min(k, width), -1).indices, k)
        return other.distance(logp, theirs), drawn, shared

    triples = by_chunks(to_other, *(x.split(chunk) for x in (hidden, other.hidden, targets)))
    apart, drawn, shared = zip(*triples, strict=True) if triples else ((empty,), (empty,), (empty,))
    return Comparison(torch.cat(apart), torch.cat(drawn), None if other.overlap_k is None else torch.cat(shared))


@dataclass(frozen=True, eq=False)
class Share:
    """One teacher at `m` of the policy's M positions, and how much it counts there."""

    places: Tensor
    """[m] positions"""
    other: Other | Likeliest | None = None
    """Its distributions there; None: no distance is measured."""
    share: float = 1.0
    logp: Tensor | None = None
    """[m], its log-probability of each token; None where it comes with the distance."""
    weight: Tensor | None = None
    """[m], how far it is to be believed."""
    span: Tensor | None = None
    """[m], of a teacher of another tokenizer: 1 + the place of the first token of each token's span of text, 0 where none is aligned."""
    distance: Tensor | None = None
    """[m], the policy's distance to it, with gradient, once measured."""
    overlap: Tensor | None = None
    """[m], share of the likeliest tokens that both have, where it is measured."""

    def measured(self, hidden: Tensor, head: Head, targets: Tensor, **options: Any) -> Share:
        """The share with its distance to the policy's `hidden` [M, D]."""
        if self.other is None:
            return self
        is_all = len(self.places) == len(hidden)
        mine, tokens = (hidden, targets) if is_all else (pick_rows(hidden, self.places), targets[self.places])
        both = compared(mine, head, self.other, tokens, **options)
        logp = self.logp if both.logp is None else both.logp
        return replace(self, distance=both.distance, logp=logp, overlap=both.overlap)


@dataclass(frozen=True, eq=False)
class Signal:
    """All teachers at the policy's positions; several at one position are averaged by their shares."""

    shares: tuple[Share, ...]
    informed: Tensor
    """[N] bool, rows that they can teach."""

    def measured(self, hidden: Tensor, head: Head, targets: Tensor, **options: Any) -> Signal:
        """The signal with the distances of the policy's `hidden` [M, D] to each teacher."""
        return replace(self, shares=tuple(share.measured(hidden, head, targets, **options) for share in self.shares))

    def spans(self, count: int, device: torch.device) -> Tensor | None:
        """[M] spans of the tokens; None if no teacher reads other tokens than the policy writes."""
        spans = [(share.places, share.span) for share in self.shares if share.span is not None]
        total = torch.zeros(count, dtype=torch.long, device=device)
        for places, span in spans:
            total[places] = span
        return total if spans else None

    def over(self, count: int, value: Callable[[Share], Tensor | None]) -> Tensor | None:
        """[M], the sum of `share x value` where a teacher speaks, 0 elsewhere; None if no teacher has the value."""
        pairs = [(share, x) for share in self.shares if (x := value(share)) is not None]
        if not pairs:
            return None
        if len(pairs) == 1 and pairs[0][0].share == 1.0 and len(pairs[0][1]) == count:
            return pairs[0][1]
        total = pairs[0][1].new_zeros(count)
        for share, x in pairs:
            total = total.index_add(0, share.places, share.share * x)
        return total

    def spread(self, rows: PaddedRows | SharedRows) -> dict[str, Any]:
        """Fields of `Measured`, once the signal is `measured`: those of M positions as [N, T]."""
        count = len(rows.target)
        spread = lambda values: None if values is None else rows.spread(values)
        span = spread(self.spans(count, rows.target.device))
        return {
            "teacher_distance": spread(self.over(count, lambda share: share.distance)),
            "teacher_weight": spread(self.over(count, lambda share: share.weight)),
            "teacher_logp": spread(self.over(count, lambda share: share.logp)),
            "teacher_overlap": spread(self.over(count, lambda share: share.overlap)),
            "teacher_span": span,
            "teacher_mask": self.informed if span is None else self.informed & (span > 0).any(-1),
        }


@torch.no_grad()
def hidden_of(policy: Any, rows: PaddedRows | SharedRows) -> tuple[Tensor, Head]:
    """[M, D] hidden states of a policy that predict the completion tokens, and the head that reads them."""

    def work() -> tuple[Tensor, Head]:
        with policy.autocast():
            hidden, _ = policy.hidden(rows)
        head = policy.head()
        if policy.shards is not None and isinstance(head.project, nn.Module):
            head = replace(head, project=copy.deepcopy(head.project))  # outlives the gathered weights
        hidden = pick_rows(hidden, rows.source)
        weights = head.project.parameters() if isinstance(head.project, nn.Module) and not head.in_float32 else ()
        if next((x.dtype for x in weights), None) == torch.bfloat16:  # as autocast does: the head is read outside of it
            hidden = hidden.bfloat16()
        return hidden, head

    states: tuple[Tensor, Head] = policy.within(work)
    return states


@torch.no_grad()
def squared_scores(policy: Any, hidden: Tensor, rows: PaddedRows | SharedRows) -> Tensor:
    """[N, T], `1 - 2 p + sum_v p_v^2` of the tokens' probability `p` after `hidden` [M, D]: the squared norm of the gradient of `log p`
    by the logits.
    """

    def work() -> Tensor:
        pieces = []
        chunk, head = policy.logits_chunk or 1024, policy.head()
        with policy.autocast():
            for part, tokens in zip(hidden.split(chunk), rows.target.split(chunk), strict=True):
                logp = torch.log_softmax(head.logits(part) / policy.temperature, -1)
                drawn = logp.gather(-1, tokens[:, None]).squeeze(-1)
                pieces.append(1.0 - 2.0 * drawn.exp() + (2.0 * logp).exp().sum(-1))
        return torch.cat(pieces) if pieces else hidden.new_zeros(0, dtype=torch.float32)

    squared: Tensor = policy.within(work)
    return rows.spread(squared)
