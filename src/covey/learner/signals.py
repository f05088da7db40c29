"""Signals of teachers at the policy's positions in one micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from covey.learner.logprobs import Head, Likeliest, Other, compared
from covey.learner.packing import pick_rows


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
