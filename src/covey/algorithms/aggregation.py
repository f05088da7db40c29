"""Aggregation of per-token losses into one number: every mean divides by totals of the whole optimizer step.

An aggregate takes per-token losses `[N, T]` (or `[N, 1]`, one a sequence), the tokens and the step's `Totals`, and returns
this micro-batch's share. Shares of all micro-batches and ranks add up to the loss of the step, for any split.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from covey.declared import NotNegative, Positive, checked_dataclass
from covey.types import TokenBatch, Totals


def masked(per_token: Tensor, tokens: TokenBatch) -> Tensor:
    """[N, T], the loss where a token counts and 0 elsewhere; `[N, 1]` is spread over the tokens of its row."""
    per_token = per_token.expand_as(tokens.mask)
    return torch.where(tokens.mask, per_token, torch.zeros_like(per_token))


def token_mean(per_token: Tensor, tokens: TokenBatch, totals: Totals) -> Tensor:
    """`sum(m l) / tokens`: every token of the step weighs the same. DAPO, Yu et al. 2025, eq. 8; also TRL's `bnpo`."""
    return masked(per_token, tokens).sum() / max(totals.tokens, 1)


def batch_token_mean(per_token: Tensor, tokens: TokenBatch, totals: Totals) -> Tensor:
    """TRL's `bnpo`, taken over the whole optimizer step: the same as `token_mean`.

    TRL divides by the tokens of each micro-batch and averages those means, so there the loss depends on how a step is
    split. Here it does not: the "batch" is the step.
    """
    return token_mean(per_token, tokens, totals)


@checked_dataclass(frozen=True)
class SequenceMean:
    """Mean over completions of each one's mean over tokens: every completion weighs the same. GRPO, Shao et al. 2024, eq. 3.

    `rows="all"` divides by all completions, those without a token that counts included, as TRL; `"nonempty"` by those that
    have one, as verl. `guard` is added to each length (verl: 1e-8).
    """

    rows: Literal["all", "nonempty"] = "all"
    guard: NotNegative = 0.0

    def __call__(self, per_token: Tensor, tokens: TokenBatch, totals: Totals) -> Tensor:
        lengths = tokens.mask.sum(-1).clamp(min=1).to(per_token.dtype) + self.guard
        return (masked(per_token, tokens).sum(-1) / lengths).sum() / _rows(self.rows, totals)


@checked_dataclass(frozen=True)
class SequenceSum:
    """Mean over completions of each one's sum over tokens: with a sequence-level loss, LUSPO's weight by length.

    `rows` as in `SequenceMean`.
    """

    rows: Literal["all", "nonempty"] = "all"

    def __call__(self, per_token: Tensor, tokens: TokenBatch, totals: Totals) -> Tensor:
        return masked(per_token, tokens).sum() / _rows(self.rows, totals)


@dataclass(frozen=True)
class RowMean:
    """Mean over all completions of a loss that is one number a completion (`[N, 1]`): GMPO, RLOO.

    A completion without a token that counts enters with its number too (it has no gradient). A loss per token becomes one
    a completion by its mean.
    """

    takes_rows = True

    def __call__(self, per_token: Tensor, tokens: TokenBatch, totals: Totals) -> Tensor:
        is_row = per_token.shape[-1] == 1 and tokens.mask.shape[-1] != 1
        row = per_token if is_row else tokens.per_sequence(per_token)
        return row.sum() / max(totals.sequences, 1)


@checked_dataclass(frozen=True)
class Constant:
    """`sum(m l) / (N length)`: no length enters the denominator. Dr. GRPO, Liu et al. 2025.

    `length` None is `max_completion_length`. `per_sequence=False` divides by `length` alone, as verl's
    `seq-mean-token-sum-norm` does.
    """

    length: Positive | None = None
    per_sequence: bool = True

    def __call__(self, per_token: Tensor, tokens: TokenBatch, totals: Totals) -> Tensor:
        length = totals.max_length if self.length is None else self.length
        rows = max(totals.sequences, 1) if self.per_sequence else 1
        return masked(per_token, tokens).sum() / (rows * length)


def prompt_mean(per_token: Tensor, tokens: TokenBatch, totals: Totals) -> Tensor:
    """Mean over prompts of the mean over all tokens of a prompt's completions: every prompt weighs the same.

    Needs `totals.tokens_by_prompt`; where it is empty the prompts are counted in this batch, which then must be the step.
    """
    counts = totals.tokens_by_prompt or Totals.of(tokens.mask, tokens.group, totals.max_length).tokens_by_prompt
    lengths = per_token.new_tensor([max(counts[group], 1) for group in tokens.group.tolist()])
    return (masked(per_token, tokens).sum(-1) / lengths).sum() / max(totals.prompts, 1)


def _rows(rows: str, totals: Totals) -> int:
    return max(totals.sequences if rows == "all" else totals.nonempty_sequences, 1)
