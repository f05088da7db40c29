"""The teacher of a distillation: another model, or the policy itself with a hint in its prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from covey.learner.logprobs import Head, Other, score_tokens
from covey.learner.packing import PaddedRows, Row, pad_rows
from covey.learner.policy import Policy
from covey.learner.shared_prompt import SharedRows
from covey.types import Group, Prompt

Hints = Callable[[Group], Sequence[str | None]]
"""Function from a group to the teacher's feedback on each completion; None: no feedback."""


@dataclass(frozen=True, eq=False)
class Teacher:
    """A frozen model for a distance over the whole vocabulary, at the completions of the policy."""

    policy: Policy
    """The teacher model; in self-distillation, it shares the trained weights."""
    distance: Callable[[Tensor, Tensor], Tensor]
    """(logp [m, V], teacher's logp [m, V]) -> [m]"""
    hints: Hints | None = None
    hinted: Callable[[Prompt, str], tuple[int, ...]] = lambda prompt, hint: prompt.token_ids
    """Token ids of the prompt with the hint inserted."""
    entropy_sensitivity: float = 0.0
    """Weigh positions with a hint by `exp(-entropy_sensitivity H)`, H the entropy of this model there; 0: no weights."""

    def at(self, packed: PaddedRows | SharedRows, rows: Sequence[Row]) -> Other:
        """The teacher's hidden states at the policy's positions: `rows`, in the order of `packed`."""
        own = [self._told(row) for row in rows] if any(row.hint is not None for row in rows) else rows
        is_same = own is rows and (isinstance(packed, PaddedRows) or self.policy.shares_prompts())
        mine = packed if is_same else pad_rows(own, self.policy.pad_id, self.policy.device)
        with self._still():
            hidden, head = self.policy.hidden_of(mine)
        self.policy.release()
        if mine is not packed:
            found = torch.empty(packed.shape[0] * packed.shape[1], dtype=torch.long, device=hidden.device)
            found[mine.place] = torch.arange(len(mine.place), device=hidden.device)
            hidden = hidden[found[packed.place]]
        weight = self._weights(hidden, head, packed, rows) if self.entropy_sensitivity else None
        return Other(hidden, head, self.distance, weight)

    @torch.no_grad()
    def _weights(self, hidden: Tensor, head: Head, packed: PaddedRows | SharedRows, rows: Sequence[Row]) -> Tensor:
        """[M]"""
        chunk, temperature = self.policy.logits_chunk, self.policy.temperature
        _, entropy = score_tokens(hidden, packed.target, head, temperature=temperature, entropy=True, chunk=chunk)
        is_told = torch.tensor([row.hint is not None for row in rows], device=hidden.device)
        return (-self.entropy_sensitivity * entropy).exp() * is_told[packed.place // packed.shape[1]]

    def _told(self, row: Row) -> Row:
        if row.hint is None:
            return row
        return replace(row, prompt=replace(row.prompt, token_ids=self.hinted(row.prompt, row.hint)))

    @contextmanager
    def _still(self) -> Iterator[None]:
        """Context in eval mode (no dropout), independent of the policy's mode."""
        was_training = self.policy.model.training
        self.policy.model.eval()
        try:
            yield
        finally:
            self.policy.model.train(was_training)
