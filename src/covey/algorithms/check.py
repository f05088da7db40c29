"""Invariants of every part of an algorithm, tried on synthetic steps before any model runs: each problem in one sentence.

`objective_problems(mine)` and its kin return what is wrong, an empty list when nothing is. A part may name invariants that its
definition breaks on purpose in `exempt`: `policy_gradient`, `zero_advantage`, `tied_groups`, `order`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from covey.algorithms.algorithm import Algorithm
from covey.algorithms.control import Controller
from covey.algorithms.critic import Critic
from covey.algorithms.distillation import zero
from covey.algorithms.kl import KL
from covey.algorithms.objectives import policy_gradient
from covey.algorithms.samples import made_scores, made_tokens
from covey.types import (
    Advantage,
    Aggregate,
    Estimator,
    Mean,
    Objective,
    ReferenceRule,
    Regularizer,
    Scores,
    StepReport,
    TokenBatch,
    Totals,
    Weight,
)

TOLERANCE = 1e-6
LEAVES = ("logp", "entropy", "values", "teacher_distance")


def objective_problems(part: Objective) -> list[str]:
    """Shape, finite numbers, the same gradient for every split, order and padding, none where no token counts or A = 0, and
    REINFORCE's direction on-policy.
    """
    algorithm = Algorithm(objective=part)
    problems = list(_step_problems(algorithm))
    exempt = getattr(part, "exempt", ())
    if not problems and "policy_gradient" not in exempt:
        problems += _direction_problems(algorithm)
    if not problems and "zero_advantage" not in exempt:
        problems += _zero_advantage_problems(algorithm)
    return problems


def regularizer_problems(part: Regularizer) -> list[str]:
    """Shape, finite numbers, the same gradient for every split, order and padding, none where no token counts."""
    return list(_step_problems(Algorithm(objective=zero, regularizers=(part,))))


def weight_problems(part: Weight) -> list[str]:
    """As a regularizer; a weight multiplies the objective and carries no gradient."""
    return list(_step_problems(Algorithm(objective=policy_gradient, weights=(part,))))


def aggregate_problems(part: Aggregate) -> list[str]:
    """Shares of micro-batches add up to the loss of the step; padding and order change nothing."""
    return list(_step_problems(Algorithm(aggregate=part)))


def kl_problems(part: Estimator | KL) -> list[str]:
    """As a regularizer; and 0 where the policy is the reference."""
    kl = part if isinstance(part, KL) else KL(part, 1.0)
    if kl.takes_distribution:
        return list(_distribution_problems(kl.estimator))
    problems = list(_step_problems(Algorithm(objective=zero, kl=replace(kl, where="loss"))))
    logp = made_tokens().logp.detach()
    worst = kl.estimator(logp, logp).abs().max().item()
    if worst > TOLERANCE:
        problems.append(f"It is {worst:.3g} where policy and reference agree; a KL is 0 there.")
    return problems


def _distribution_problems(estimator: Estimator) -> Iterator[str]:
    """For an estimator of whole distributions: [M, V] log-probabilities of both in, [M] out."""
    logits = torch.linspace(-3.0, 3.0, 24, dtype=torch.float64).view(4, 6)
    logp = torch.log_softmax(logits, -1).requires_grad_()
    theirs = torch.log_softmax(logits.flip(0), -1)
    value = estimator(logp, theirs)
    if tuple(value.shape) != (4,):
        yield f"It returned shape {list(value.shape)} for 4 positions; it must return one value a position, [4]."
        return
    if not bool(value.isfinite().all()) or bool((value < -TOLERANCE).any()):
        yield "Its value is negative or not finite; a distance of distributions is neither."
    if estimator(theirs, theirs).abs().max().item() > TOLERANCE:
        yield "It is not 0 where policy and reference agree; a KL is 0 there."


def critic_problems(part: Critic | Callable[[TokenBatch], Tensor]) -> list[str]:
    """As a regularizer, with the gradient of the critic's values."""
    critic = part if isinstance(part, Critic) else Critic(part)
    return list(_step_problems(_CriticLoss(critic)))


def advantage_problems(part: Advantage) -> list[str]:
    """Shape, finite numbers, 0 for tied groups and unscored completions, which do not move their siblings; order, padding,
    groups of one.
    """
    algorithm = Algorithm(advantage=part)
    try:
        algorithm.judge(made_scores())
    except ValueError as error:
        return [str(error)]
    problems = [*_finite_advantages(part), *_unscored_problems(part), *_reordered_scores(part)]
    if "tied_groups" not in getattr(part, "exempt", ()):
        problems += _tied_problems(part)
    return problems


def reference_problems(part: ReferenceRule) -> list[str]:
    """alpha must be a number from 0 to 1 for any report, also one without a KL."""
    problems = []
    for step, kl in ((1, 0.0), (2, 0.03), (3, 5.0), (512, math.nan)):
        report = StepReport(step=step, metrics={"kl": Mean(kl, 1.0)} if kl == kl else {})
        alpha = part(report)
        if not isinstance(alpha, (int, float)) or not 0.0 <= alpha <= 1.0:
            problems.append(
                f"At step {step} with KL {kl} it returned {alpha!r}; alpha is a number from 0 (keep) to 1 (copy)."
            )
    return problems


def controller_problems(part: Controller) -> list[str]:
    """Finite numbers from `init` and from `update`, also from a report without any metric."""
    value, problems = part.init(), []
    for step, metrics in enumerate(({}, {"kl": Mean(9.0, 1.0), "entropy": Mean(0.01, 1.0)}, {}), start=1):
        value = part.update(value, StepReport(step=step, metrics=metrics))
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            problems.append(
                f"After {'a report without metrics' if not metrics else 'an ordinary report'} it is {value!r}."
            )
            break
    return problems


PROBLEMS: Mapping[str, Callable[[Any], list[str]]] = {
    "advantage": advantage_problems,
    "objective": objective_problems,
    "aggregate": aggregate_problems,
    "kl": kl_problems,
    "regularizer": regularizer_problems,
    "weight": weight_problems,
    "reference": reference_problems,
    "critic": critic_problems,
    "controller": controller_problems,
}
"""The check of each kind of part."""


# -- parts that see tokens ------------------------------------------------------------------------------------------------


class _CriticLoss:
    """The critic's loss in the place of an algorithm's."""

    def __init__(self, critic: Critic) -> None:
        self.critic = critic

    def prepare(self, tokens: TokenBatch, totals: Totals) -> _CriticLoss:
        return self

    def loss(self, tokens: TokenBatch, totals: Totals) -> Tensor:
        return self.critic.loss(tokens, totals)


def _totals(tokens: TokenBatch) -> Totals:
    return Totals.of(tokens.mask, tokens.group, 16, tokens.observed)


def step_gradients(algorithm: Any, tokens: TokenBatch, sizes: Sequence[int] = ()) -> dict[str, Tensor]:
    """Gradients [N, T] of one step's loss by leaf (`LEAVES`), in micro-batches of `sizes` rows (one where
    empty), and its `loss` [].
    """
    leaves = {name: getattr(tokens, name).detach().clone().requires_grad_() for name in LEAVES}
    tokens = TokenBatch(**{**tokens.tensors(), **leaves})
    totals = _totals(tokens)
    prepared = algorithm.prepare(tokens.detached(), totals)
    loss, start = torch.zeros((), dtype=tokens.logp.dtype), 0
    for size in sizes or (tokens.mask.shape[0],):
        loss = loss + prepared.loss(tokens.rows(start, start + size), totals)
        start += size
    gradients = {"loss": loss.detach()}
    grads: list[Tensor | None] = [None] * len(leaves)
    if loss.requires_grad:
        grads = list(torch.autograd.grad(loss, list(leaves.values()), allow_unused=True))
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        gradients[name] = torch.zeros_like(leaf) if grad is None else grad
    return gradients


def _step_problems(algorithm: Any) -> Iterator[str]:
    tokens = made_tokens()
    try:
        whole = step_gradients(algorithm, tokens)
    except ValueError as error:
        yield str(error)
        return
    if not _is_finite(whole):
        yield "On an ordinary step its value or gradient is not finite."
        return
    yield from _split_problems(algorithm, tokens, whole)
    yield from _mask_problems(algorithm, tokens, whole)
    yield from _extreme_problems(algorithm)


def _split_problems(algorithm: Any, tokens: TokenBatch, whole: Mapping[str, Tensor]) -> Iterator[str]:
    for sizes in ((6, 6), (1,) * 12, (1, 7, 4)):
        apart = _apart(whole, step_gradients(algorithm, tokens, sizes))
        if apart > TOLERANCE:
            yield (
                f"In micro-batches of {', '.join(map(str, sizes))} rows the gradient differs by {apart:.1%} from that of the "
                "whole step: return the value of each token and no mean over rows, or take what it must know of the step "
                "in prepare(tokens, totals)."
            )
            return
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    shuffled = TokenBatch(**{name: value[order] for name, value in tokens.tensors().items()})
    moved = step_gradients(algorithm, shuffled)
    back = {name: value if name == "loss" else value[order.argsort()] for name, value in moved.items()}
    if (apart := _apart(whole, back)) > TOLERANCE:
        yield f"With the same completions in another order the gradient differs by {apart:.1%}: no row may depend on its place."


def _mask_problems(algorithm: Any, tokens: TokenBatch, whole: Mapping[str, Tensor]) -> Iterator[str]:
    for name in LEAVES:
        if bool(whole[name][~tokens.mask].any()):
            yield f"Tokens that do not count have a gradient of {name}: multiply by tokens.mask, or use tokens.per_sequence."
    rubbish = made_tokens(rubbish=30.0)
    if (apart := _apart(whole, step_gradients(algorithm, rubbish))) > TOLERANCE:
        yield f"Numbers where the mask is False change the gradient by {apart:.1%}: they mean nothing and may be anything."
    wider = {name: _padded(value) for name, value in tokens.tensors().items()}
    padded = step_gradients(algorithm, TokenBatch(**wider))
    cut = {name: value if name == "loss" else value[:, : tokens.mask.shape[1]] for name, value in padded.items()}
    if (apart := _apart(whole, cut)) > TOLERANCE:
        yield f"Padding to more tokens changes the gradient by {apart:.1%}: divide by tokens.lengths, never by the width."


def _padded(value: Tensor) -> Tensor:
    return value if value.ndim == 1 or value.shape[1] == 1 else torch.nn.functional.pad(value, (0, 3))


def _extreme_problems(algorithm: Any) -> Iterator[str]:
    tokens = made_tokens(dtype=torch.float32)
    for gap in (40.0, -40.0):
        far = {name: tokens.logp.detach() - gap for name in ("old_logp", "sampler_logp", "ref_logp", "teacher_logp")}
        if not _is_finite(step_gradients(algorithm, replace(tokens, **far))):
            yield f"With log-ratios of {gap:+.0f} in float32 its value or gradient is not finite: clamp what you exponentiate."
    empty = replace(tokens, mask=torch.zeros_like(tokens.mask))
    if not _is_finite(step_gradients(algorithm, empty)):
        yield "Without any token that counts its value or gradient is not finite: a denominator can be 0 there."
    if not _is_finite(step_gradients(algorithm, tokens.rows(0, 1))):
        yield "On a single completion its value or gradient is not finite: a deviation of one value is undefined."


def _direction_problems(algorithm: Algorithm) -> Iterator[str]:
    tokens = made_tokens(drift=0.0)
    counts = tokens.mask.any(-1)
    gradient = (step_gradients(algorithm, tokens)["logp"] / -tokens.advantages)[counts]  # [n, T], c > 0 where REINFORCE
    mask = tokens.mask[counts]
    slope = torch.where(mask, gradient, torch.zeros_like(gradient)).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    off = torch.where(mask, (gradient - slope).abs() / slope.abs().clamp(min=1e-12), torch.zeros_like(gradient))
    if bool((slope <= 0).any()) or off.max().item() > TOLERANCE:
        yield (
            "On-policy (every ratio 1) its gradient is not that of the policy gradient, -advantage for each token of a "
            f"completion: it differs by up to {off.max().item():.1%}. If that is meant, set exempt = ('policy_gradient',) on it."
        )


def _zero_advantage_problems(algorithm: Algorithm) -> Iterator[str]:
    tokens = made_tokens()
    tokens = replace(tokens, advantages=torch.zeros_like(tokens.advantages))
    if bool(step_gradients(algorithm, tokens)["logp"].any()):
        yield (
            "With all advantages 0 there is still a gradient: a group of equal rewards would teach something. If that is "
            "meant, set exempt = ('zero_advantage',) on it, or make it a regularizer."
        )


def _is_finite(gradients: Mapping[str, Tensor]) -> bool:
    return all(bool(value.isfinite().all()) for value in gradients.values())


def _apart(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Largest difference between gradients (and losses), relative to the largest gradient."""
    size = max(max(a[name].abs().max().item() for name in LEAVES), 1e-12)
    worst = max((a[name] - b[name]).abs().max().item() for name in LEAVES)
    scale = max(a["loss"].abs().item(), size)
    return max(worst / size, (a["loss"] - b["loss"]).abs().item() / scale)


# -- advantages -----------------------------------------------------------------------------------------------------------


def _finite_advantages(part: Advantage) -> Iterator[str]:
    unscored = torch.full((2, 3, 1), math.nan, dtype=torch.float64)
    cases = {
        "ordinary rewards": made_scores(),
        "groups of one completion": made_scores(group_size=1),
        "nobody scored": made_scores(unscored),
        "no token that counts": replace(made_scores(), mask=torch.zeros(3, 4, 6, dtype=torch.bool)),
        "rewards of 1e6": made_scores(1e6 * torch.rand(2, 4, 1, dtype=torch.float64)),
    }
    for name, scores in cases.items():
        judged = part(scores)
        if not bool(judged.isfinite().all()):
            yield f"With {name} it returns numbers that are not finite; return 0 where nothing can be said (nan_to_num)."


def _tied_problems(part: Advantage) -> Iterator[str]:
    for value in (0.1, 0.35, 0.95):
        for size in (3, 7, 8):
            tied = torch.full((1, size, 1), value, dtype=torch.float32)
            worst = part(made_scores(tied, dtype=torch.float32)).abs().max().item()
            if worst != 0.0:
                yield (
                    f"A group of {size} rewards that are all {value} gets an advantage of {worst:.3g}, not 0, in float32: "
                    "compare largest and smallest instead of dividing by a tiny deviation. If it does not compare within the "
                    "group, set exempt = ('tied_groups',) on it."
                )
                return


def _unscored_problems(part: Advantage) -> Iterator[str]:
    scores = made_scores()
    missing = scores.per_function.clone()
    missing[:, 2] = math.nan
    with_gap = part(replace(scores, per_function=missing))
    if bool(with_gap[:, 2].any()):
        yield "A completion that nobody scored (NaN) gets an advantage; it must get 0."
    without = part(_taken(scores, torch.tensor([0, 1, 3])))
    if not torch.allclose(with_gap[:, [0, 1, 3]], without, rtol=1e-9, atol=1e-12):
        yield (
            "A completion that nobody scored (NaN) moves the advantages of its siblings: leave it out of means, deviations "
            "and counts (torch.nanmean, nansum)."
        )


def _reordered_scores(part: Advantage) -> Iterator[str]:
    if "order" in getattr(part, "exempt", ()):
        return
    scores, order = made_scores(), torch.tensor([2, 0, 3, 1])
    plain, moved = part(scores), part(_taken(scores, order))
    if not torch.allclose(plain[:, order], moved, rtol=1e-9, atol=1e-12):
        yield "With the completions of a group in another order each gets another advantage; no place may matter."
    wide = lambda x: torch.nn.functional.pad(x, (0, 3))
    assert scores.values is not None  # made_scores fills it
    padded = part(
        replace(scores, mask=wide(scores.mask), values=wide(scores.values), squared_score=wide(scores.squared_score))
    )
    if padded.ndim == 3:
        padded = padded[..., : plain.shape[-1]]
    if not torch.allclose(plain, padded, rtol=1e-9, atol=1e-12):
        yield "Padding to more tokens changes the advantages; count with scores.mask or scores.lengths."


def _taken(scores: Scores, indices: Tensor) -> Scores:
    """The completions of these places in each group."""
    pick = lambda x: None if x is None else x[:, indices]
    return replace(
        scores,
        per_function=scores.per_function[:, indices],
        mask=scores.mask[:, indices],
        values=pick(scores.values),
        squared_score=pick(scores.squared_score),
    )
