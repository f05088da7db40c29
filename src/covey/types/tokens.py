"""Input of an algorithm in one micro-batch, and the denominators of an optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBatch:
    """Input of objectives, KL terms and regularizers: N completions padded to T tokens, whether or not the learner packed them.

    Only `logp`, `observed_logp`, `entropy`, `full_kl`, `teacher_distance` and `values` carry gradient. Where `mask` is False every entry is finite and means nothing.
    """

    logp: Tensor
    """[N, T], the policy that is being trained."""
    old_logp: Tensor
    """[N, T], the policy at the time of the rollout, by the learner; on-policy it is `logp.detach()`."""
    advantages: Tensor
    """[N, 1] or [N, T]"""
    mask: Tensor
    """[N, T] bool, tokens that count."""
    group: Tensor
    """[N] int64, which prompt the row answers; rows of one prompt need not be adjacent."""
    sampler_logp: Tensor | None = None
    """[N, T], as drawn by the sampler, NaN where it returned none. None: the sampler is the learner."""
    same_weights: Tensor | None = None
    """[N] bool, rows that this process drew with the very weights of `old_logp`: there `sampler_logp` differs by rounding alone."""
    ref_logp: Tensor | None = None
    """[N, T], the reference model."""
    full_kl: Tensor | None = None
    """[N, T], distance to the reference over the whole vocabulary, with gradient, where a KL term asks for it."""
    teacher_distance: Tensor | None = None
    """[N, T], divergence from a teacher over the whole vocabulary, with gradient, where a distillation asks for it."""
    teacher_weight: Tensor | None = None
    """[N, T], how far a teacher is to be believed at each token, where a distillation asks for it; 0 without feedback."""
    teacher_logp: Tensor | None = None
    """[N, T], a teacher's log-probability of each token, where a part asks for it. Of a teacher of another tokenizer it is that which has
    the gap of the token's span to `old_logp`, and `old_logp` itself where none is aligned."""
    teacher_overlap: Tensor | None = None
    """[N, T], share of the likeliest tokens that the policy has in common with a teacher, where a distillation measures it."""
    teacher_span: Tensor | None = None
    """[N, T] int64, 1 + the place of the first token of each token's span, 0 where none is aligned: pieces of text at whose ends both
    tokenizers part. None: the teacher reads the policy's tokens."""
    teacher_mask: Tensor | None = None
    """[N] bool, rows that the teacher can teach: it has feedback on them, and answered. None: all of them."""
    observed: Tensor | None = None
    """[N, T] bool, tokens with which a tool or an environment answered, where a part asks for them; none of them is in `mask`."""
    observed_logp: Tensor | None = None
    """[N, T], the policy's log-probability of these tokens, with gradient; 0 elsewhere."""
    entropy: Tensor | None = None
    """[N, T], entropy of the policy's distribution at each token, in nats."""
    values: Tensor | None = None
    """[N, T], the critic now."""
    old_values: Tensor | None = None
    """[N, T], the critic at the time of the rollout."""
    returns: Tensor | None = None
    """[N, T], targets of the critic; NaN of a completion that nobody scored."""
    weight: Tensor | None = None
    """[N, T], factor on the objective of completions that another model wrote, 1 for the policy's own. None: 1 everywhere."""
    scored: Tensor | None = None
    """[N] bool, rows that a reward scored. None: all."""
    row: Tensor | None = None
    """[N] int64, index of the completion within the optimizer step, in any micro-batch; seeds per-row randomness."""

    @cached_property
    def log_ratio(self) -> Tensor:
        """[N, T], `logp - old_logp`, 0 off the mask."""
        return torch.where(self.mask, self.logp - self.old_logp, torch.zeros_like(self.logp))

    @cached_property
    def ratio(self) -> Tensor:
        """[N, T], `exp(log_ratio)`, 1 off the mask. A log-ratio above 60 counts as 60, so that float32 stays finite."""
        return self.log_ratio.clamp(max=60.0).exp()

    @cached_property
    def lengths(self) -> Tensor:
        """[N, 1], tokens that count in each row, at least 1."""
        return self.mask.sum(-1, keepdim=True).clamp(min=1).to(self.logp.dtype)

    def per_sequence(self, x: Tensor) -> Tensor:
        """[N, 1], the mean of `x` [N, T] over the tokens that count of each row (0 for a row without any)."""
        return torch.where(self.mask, x, torch.zeros_like(x)).sum(-1, keepdim=True) / self.lengths

    def rows(self, start: int, stop: int) -> TokenBatch:
        """Rows `start` to `stop` of everything."""
        cut = {name: value[start:stop] for name, value in self.tensors().items()}
        return TokenBatch(**cut)

    def detached(self) -> TokenBatch:
        """The same numbers without gradient."""
        return TokenBatch(**{name: value.detach() for name, value in self.tensors().items()})

    @staticmethod
    def concat(batches: Sequence[TokenBatch]) -> TokenBatch:
        """Rows of all batches below each other, padded with zeros (False) to the longest."""
        filled = {
            name: fill for name, fill in _WHERE_ABSENT.items() if any(getattr(b, name) is not None for b in batches)
        }
        parts = [batch.filled(filled).tensors() for batch in batches]
        longest = max(batch.mask.shape[1] for batch in batches)
        joined = {}
        for name in parts[0]:
            wide = any(part[name].ndim == 2 and part[name].shape[1] > 1 for part in parts) or name == "mask"
            joined[name] = torch.cat([_widen(part[name], longest) if wide else part[name] for part in parts])
        return TokenBatch(**joined)

    def filled(self, fills: Mapping[str, float]) -> TokenBatch:
        """The same, with [N, T] of these numbers in the named fields that are None."""
        absent = {name: fill for name, fill in fills.items() if getattr(self, name) is None}
        return replace(self, **{name: torch.full_like(self.logp, fill) for name, fill in absent.items()})

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that is present, by field name."""
        names = self.__dataclass_fields__
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


_WHERE_ABSENT = {"weight": 1.0, "sampler_logp": math.nan}
"""Fields that a micro-batch may lack where another of the same step has them, and what they mean there."""


def over_spans(x: Tensor, span: Tensor) -> Tensor:
    """[N, T], the sum of `x` [N, T] over each token's span (as `TokenBatch.teacher_span`); 0 where none is aligned."""
    place = (span - 1).clamp(min=0)
    aligned = torch.where(span > 0, x, torch.zeros_like(x))
    total = torch.zeros_like(x).scatter_add(1, place, aligned).gather(1, place)
    return torch.where(span > 0, total, torch.zeros_like(x))


def _widen(x: Tensor, width: int) -> Tensor:
    """[N, width] from [N, T] with zeros at the end; a 1-d tensor stays as it is."""
    return x if x.ndim == 1 else torch.nn.functional.pad(x, (0, width - x.shape[1]))


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Denominators of one optimizer step: counted over all micro-batches and all processes before the first backward."""

    tokens: int
    """Tokens that count."""
    sequences: int
    """Completions, fully masked ones included."""
    nonempty_sequences: int
    """Completions with at least one token that counts."""
    prompts: int
    max_length: int
    """`max_completion_length`, the constant of Dr. GRPO."""
    observed: int = 0
    """Tokens with which tools and environments answered."""
    tokens_by_prompt: Mapping[int, int] = field(default_factory=dict)
    """Tokens that count of each prompt, by its number in `TokenBatch.group`. Empty: not counted."""
    expert_loads: Tensor | None = None
    """[E + 1], how often each expert was chosen in the whole step, and the tokens and layers that chose. None: not counted."""

    @staticmethod
    def of(mask: Tensor, group: Tensor, max_length: int, observed: Tensor | None = None) -> Totals:
        """Count a step held in one batch: `mask` [N, T], `group` [N], `observed` [N, T]."""
        return Totals(
            tokens=int(mask.sum()),
            sequences=int(mask.shape[0]),
            nonempty_sequences=int(mask.any(-1).sum()),
            prompts=int(group.unique().numel()),
            max_length=max_length,
            observed=0 if observed is None else int(observed.sum()),
            tokens_by_prompt={int(g): int(mask[group == g].sum()) for g in group.unique()},
        )
