"""Optional attributes of an algorithm's parts, and how the library uses them.

A part may have `metrics(tokens) -> {name: [N, T], [N, 1] or a Metric}`, `prepare(tokens, totals) -> part` where it needs
statistics of the whole optimizer step, `needs`, names of what it reads (see `Needs`), `exempt`, names of invariants that its
definition breaks on purpose (see `check.py`), and, for an objective, `scales_with_advantage = True` where a zero advantage
leaves neither value nor gradient, so that the learner may skip the backward of such completions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from covey.types import Advantage, Max, Mean, Metric, Min, Scores, TokenBatch, Totals, precise


class Wrapping:
    """Base of an advantage around another, `advantage`, whose needs and exemptions are its own."""

    advantage: Advantage

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(getattr(self.advantage, "needs", ()))

    @property
    def exempt(self) -> tuple[str, ...]:
        return tuple(getattr(self.advantage, "exempt", ()))

    @property
    def column(self) -> str | None:
        return getattr(self.advantage, "column", None)

    def inner(self, scores: Scores) -> Scores:
        """The scores that the inner advantage judges."""
        return scores

    def recalled(self, memory: Mapping[str, float]) -> Any:
        """The part around the inner advantage with its memory of earlier rollouts."""
        return replace(self, advantage=recalled(self.advantage, memory))  # type: ignore[type-var]

    def remembered(self, scores: Scores) -> dict[str, float]:
        """The inner advantage's memory after these completions."""
        return remembered(self.advantage, self.inner(scores))


def recalled(advantage: Any, memory: Mapping[str, float]) -> Any:
    """The advantage with its memory of earlier rollouts, where it has one."""
    recall = getattr(advantage, "recalled", None)
    return recall(memory) if callable(recall) else advantage


def remembered(advantage: Any, scores: Scores) -> dict[str, float]:
    """An advantage's memory after these completions; empty where it has none."""
    remember = getattr(advantage, "remembered", None)
    return dict(remember(scores)) if callable(remember) else {}


def zeroed(judged: Tensor, completions: Tensor) -> Tensor:
    """Advantages [P, G] or [P, G, T], 0 for the `completions` [P, G] that are True."""
    return judged.masked_fill(completions if judged.ndim == 2 else completions.unsqueeze(-1), 0.0)


P = TypeVar("P")
NO_TOTALS = Totals(tokens=0, sequences=0, nonempty_sequences=0, prompts=0, max_length=0)
"""For a `prepare` that reads no denominators, called on a batch that is the whole step."""


def compared(tokens: TokenBatch) -> Tensor:
    """[N] bool, completions that objectives over a whole group compare: those with a token that counts and a score."""
    counts = tokens.mask.any(-1)
    return counts if tokens.scored is None else counts & tokens.scored


def prepared(part: P, tokens: TokenBatch, totals: Totals) -> P:
    """The part fitted to the whole step, or itself where it has no `prepare`; each of a tuple of parts."""
    if isinstance(part, tuple):
        return tuple(prepared(each, tokens, totals) for each in part)  # type: ignore[return-value]
    prepare = getattr(part, "prepare", None)
    return prepare(tokens, totals) if callable(prepare) else part


def prepared_in(part: P, names: Sequence[str], tokens: TokenBatch, totals: Totals) -> P:
    """The dataclass `part` with the parts inside the named fields prepared."""
    changes = {name: prepared(getattr(part, name), tokens, totals) for name in names}
    return replace(part, **changes)  # type: ignore[type-var]


def needs_whole_step(part: Any) -> bool:
    """True if the part has a `prepare` with work to do (`is_stepwise` is True or missing)."""
    return callable(getattr(part, "prepare", None)) and bool(getattr(part, "is_stepwise", True))


def is_apart(part: Any) -> bool:
    """True for a regularizer over rows of its own, whose term the learner adds."""
    return bool(getattr(part, "is_apart", False))


def metrics_of(part: Any, tokens: TokenBatch) -> dict[str, Metric]:
    """Metrics of a part's own `metrics`, mergeable: `[N, T]` averaged over tokens of the mask, `[N, 1]` over all rows."""
    measure = getattr(part, "metrics", None)
    if not callable(measure):
        return {}
    return {name: _as_metric(name, value, tokens) for name, value in measure(tokens).items()}


def _as_metric(name: str, value: Any, tokens: TokenBatch) -> Metric:
    if not isinstance(value, Tensor):
        return value  # type: ignore[no-any-return]
    rows, width = tokens.mask.shape
    if tuple(value.shape) == (rows, width):
        return Mean.of(value, tokens.mask)
    if tuple(value.shape) == (rows, 1):
        return Mean.of(value)
    raise ValueError(
        f"The metric {name!r} has shape {list(value.shape)}; return one value a token, [{rows}, {width}], or one a "
        f"sequence, [{rows}, 1]; the library takes the mean."
    )


def clip_metrics(low: Tensor, high: Tensor, tokens: TokenBatch) -> dict[str, Tensor | Metric]:
    """TRL's `clip_ratio/*` from where the ratio is below or above its range: `[N, T]` or `[N, 1]` bool."""
    is_token = low.shape[-1] == tokens.mask.shape[-1]
    rows = lambda x: tokens.per_sequence(x.to(tokens.logp.dtype))[tokens.mask.any(-1)] if is_token else precise(x)
    lows, highs = rows(low), rows(high)
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low | high,
        "clip_ratio/low_min": Min(lows.min().item() if lows.numel() else float("nan")),
        "clip_ratio/high_max": Max(highs.max().item() if highs.numel() else float("nan")),
    }


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """[] mean of `x` where `mask`; 0 where nothing is."""
    return torch.where(mask, x, torch.zeros_like(x)).sum() / mask.sum().clamp(min=1)
