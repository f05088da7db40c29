"""Signals of a teacher by token: what its log-probabilities say of the policy's own tokens, as advantages or as a term.

Letters: `q` the teacher, `p` the policy, `d = log q - log p` at the token that was drawn: above 0 where the teacher would
rather have drawn it. Its mean under the policy is minus the reverse KL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as changed
from typing import ClassVar, Literal

import torch
from torch import Tensor

from covey.algorithms.aggregation import token_mean
from covey.algorithms.composing import metrics_of, needs_whole_step, prepared
from covey.algorithms.control import Controller, WarmUp, current
from covey.algorithms.objectives import Clipped
from covey.declared import BelowOne, Finite, NotNegative, Positive, Share, checked_dataclass
from covey.types import Aggregate, Mean, Metric, Objective, TokenBatch, Totals, over_spans

LIMIT = 60.0
"""Largest log-ratio that is exponentiated: e^60 is finite in float32 with room to add up."""


def informed(tokens: TokenBatch) -> Tensor:
    """[N, 1], 1 for rows that the teacher can teach, 0 for the others."""
    if tokens.teacher_mask is None:
        return tokens.logp.new_ones(len(tokens.logp), 1)
    return tokens.teacher_mask[:, None].to(tokens.logp.dtype)


def reached(tokens: TokenBatch) -> Tensor:
    """[N, T] bool, tokens of which the teacher says something: of a teacher of another tokenizer those in an aligned span."""
    rows = tokens.mask & (informed(tokens) > 0)
    return rows if tokens.teacher_span is None else rows & (tokens.teacher_span > 0)


def teacher_gap(tokens: TokenBatch, against: Literal["old", "current"] = "old") -> Tensor:
    """[N, T], `log q - log p` without gradient: against the policy at the rollout or now; 0 where the teacher says nothing.

    With a teacher of another tokenizer each token of an aligned span has the gap of the whole span, which is one action then: its
    gradient is the sum of its tokens', and the policy's gradient that of the divergence of spans.
    """
    if tokens.teacher_logp is None:
        raise ValueError("A part needs teacher_logp, measured by the learner; this batch has none.")
    if tokens.teacher_span is None:
        policy_logp = tokens.old_logp if against == "old" else tokens.logp
        return (tokens.teacher_logp - policy_logp).detach() * informed(tokens) * tokens.mask
    gap = (tokens.teacher_logp - tokens.old_logp).detach()
    if against == "current":
        gap = gap - over_spans((tokens.logp - tokens.old_logp).detach(), tokens.teacher_span)
    return gap * reached(tokens)


def gap_of_tokens(tokens: TokenBatch) -> Tensor:
    """[N, T], `teacher_gap` shared out evenly over the tokens of a span, so that the tokens of a completion add up to its gap."""
    gap = teacher_gap(tokens)
    if tokens.teacher_span is None:
        return gap
    return gap / over_spans(torch.ones_like(gap), tokens.teacher_span).clamp(min=1.0)


@checked_dataclass(frozen=True)
class TeacherAdvantage:
    """`reward A + weight d`: the teacher's log-ratio as the advantage of each token, plus the reward's.

    MOPD, Xiao et al. 2026, <https://arxiv.org/abs/2601.02780>, eq. 8, with `reward=0`; ms-swift's OPD-RL with `reward=1`.
    `against="current"` takes the policy of now, so that the gradient stays that of the reverse KL over several updates.
    """

    weight: Finite = 1.0
    reward: Finite = 0.0
    against: Literal["old", "current"] = "old"
    exempt: ClassVar[tuple[str, ...]] = ("policy_gradient", "zero_advantage")
    is_shape = True
    """It returns advantages; as an algorithm's objective it becomes `Reshaped(it)`."""

    @property
    def ignores_rewards(self) -> bool:
        """True if the teacher alone moves the policy, so that no group needs a baseline."""
        return self.reward == 0

    def __call__(self, tokens: TokenBatch) -> Tensor:
        return self.reward * tokens.advantages + self.weight * teacher_gap(tokens, self.against)


@checked_dataclass(frozen=True)
class TeacherReweighted:
    """`A (1 - strength + strength clip(exp(sign(A) d), 1 - clip, 1 + clip))`: the teacher shares a reward out over its tokens.

    The sign stays that of the reward, and a teacher that agrees with the policy changes nothing. `negative_only`: completions of
    negative advantage alone. RLSD, 2026, <https://arxiv.org/abs/2604.03128>; defaults are ms-swift's.
    """

    strength: Share | Controller = 0.5
    """A number, or `WarmUp(target, steps, decay)`."""
    clip: BelowOne = 0.2
    negative_only: bool = False
    exempt: ClassVar[tuple[str, ...]] = ("policy_gradient",)
    scales_with_advantage = True
    is_shape = True

    def __post_init__(self) -> None:
        if isinstance(self.strength, WarmUp):
            changed(self, strength=self.strength.target)  # in the range of a strength

    def __call__(self, tokens: TokenBatch) -> Tensor:
        return tokens.advantages * self.factor(tokens)

    def factor(self, tokens: TokenBatch) -> Tensor:
        """[N, T]"""
        evidence = self._evidence(tokens)
        strength = current(self.strength)
        factor = 1.0 - strength + strength * evidence.clamp(1.0 - self.clip, 1.0 + self.clip)
        return torch.where(tokens.advantages < 0, factor, torch.ones_like(factor)) if self.negative_only else factor

    def metrics(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """`teacher/weight_bounded`: share of tokens whose weight the clip holds."""
        return {"teacher/weight_bounded": ((self._evidence(tokens) - 1.0).abs() > self.clip).float()}

    def _evidence(self, tokens: TokenBatch) -> Tensor:
        """[N, T], `exp(sign(A) d)`."""
        return (tokens.advantages.sign() * teacher_gap(tokens)).clamp(-LIMIT, LIMIT).exp()


@checked_dataclass(frozen=True)
class PositionWeighted:
    """`w d`, `w_t = 1 + gamma (1 - sum_{k < t} abs(d_k) / sum_k abs(d_k))`: early disagreement counts most.

    Beyond it a completion has left the teacher's own paths. IW-OPD, 2026, <https://arxiv.org/abs/2606.22600>; `gamma` as TRL's
    `iw_opd_gamma`.
    """

    gamma: NotNegative = 0.5
    epsilon: Positive = 1e-8
    exempt: ClassVar[tuple[str, ...]] = ("policy_gradient", "zero_advantage")
    is_shape = True
    ignores_rewards = True

    def __call__(self, tokens: TokenBatch) -> Tensor:
        gap = teacher_gap(tokens)
        size = gap_of_tokens(tokens).abs()
        before = size.cumsum(-1) - size
        if tokens.teacher_span is not None:
            before = before.gather(1, (tokens.teacher_span - 1).clamp(min=0))  # a span weighs as it begins
        return (1.0 + self.gamma * (1.0 - before / size.sum(-1, keepdim=True).clamp(min=self.epsilon))) * gap


@dataclass(frozen=True)
class Reshaped:
    """An objective whose advantages a function of the tokens replaces: `objective(tokens with advantages shape(tokens))`.

    `shape` takes a TokenBatch, with `teacher_logp`, `ref_logp`, `old_logp` and `advantages`, and returns [N, T] or [N, 1]:
    `alg.Reshaped(alg.TeacherReweighted())`, or one's own function. It carries no gradient.
    """

    shape: Callable[[TokenBatch], Tensor]
    objective: Objective = field(default_factory=Clipped)

    def __call__(self, tokens: TokenBatch) -> Tensor:
        return self.objective(self._reshaped(tokens))

    def _reshaped(self, tokens: TokenBatch) -> TokenBatch:
        return changed(tokens, advantages=self.shape(tokens).detach())

    @property
    def needs(self) -> tuple[str, ...]:
        of_shape = getattr(self.shape, "needs", ("teacher_logp",))
        return (*of_shape, *getattr(self.objective, "needs", ()))

    @property
    def exempt(self) -> tuple[str, ...]:
        of_shape = getattr(self.shape, "exempt", ("policy_gradient", "zero_advantage"))
        return (*of_shape, *getattr(self.objective, "exempt", ()))

    @property
    def scales_with_advantage(self) -> bool:
        return all(getattr(part, "scales_with_advantage", False) for part in (self.shape, self.objective))

    @property
    def ignores_rewards(self) -> bool:
        return bool(getattr(self.shape, "ignores_rewards", False))

    @property
    def is_stepwise(self) -> bool:
        return needs_whole_step(self.objective)

    def prepare(self, tokens: TokenBatch, totals: Totals) -> Reshaped:
        """The objective fitted to the whole step, with the advantages that it will see."""
        return changed(self, objective=prepared(self.objective, self._reshaped(tokens), totals))

    def metrics(self, tokens: TokenBatch) -> Mapping[str, Tensor | Metric]:
        """Those of the shape and of the objective."""
        return {**metrics_of(self.shape, tokens), **metrics_of(self.objective, self._reshaped(tokens))}


@checked_dataclass(frozen=True)
class GatedDistill:
    """`weight sigmoid(beta d) d`, the gate without gradient: the policy is drawn up at tokens that the teacher likes better.

    The gradient of a token is `-weight sigmoid(beta d)` times that of its log-probability, so tokens that the teacher likes
    less are hardly touched. SDAR, 2026, <https://arxiv.org/abs/2605.15155>; `beta` as ms-swift's `sdar_gate_beta`.
    """

    weight: Positive | Controller = 0.1
    beta: Positive = 5.0
    aggregate: Aggregate | None = token_mean
    needs: ClassVar[tuple[str, ...]] = ("teacher_logp",)

    def __call__(self, tokens: TokenBatch) -> Tensor:
        gap = teacher_gap(tokens, "current")
        # gap in value, with the policy's gradient
        toward = (gap + tokens.logp.detach() - tokens.logp) * reached(tokens)
        return current(self.weight) * (self.beta * gap).sigmoid() * toward

    def metrics(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """`sdar/gate_mean`, and `sdar/gate_active_ratio`, tokens that the teacher likes better."""
        gap = teacher_gap(tokens, "current")
        return {"sdar/gate_mean": (self.beta * gap).sigmoid(), "sdar/gate_active_ratio": (gap > 0).float()}


def signal_metrics(tokens: TokenBatch) -> dict[str, Metric]:
    """`teacher/gap`, mean `d` of a token; `teacher/informed`, share of completions that it can teach; `teacher/agreement`; and of a
    teacher of another tokenizer `teacher/aligned`, share of their tokens in an aligned span.

    Agreement: `sum A g / sum abs(A g)` over completions, `g` the mean `d` of one, from -1 to 1. Advantages of a group sum to 0,
    so a teacher that likes all completions alike has 0, and one that ranks them against the reward is below.
    """
    if tokens.teacher_logp is None:
        return {}
    gap = gap_of_tokens(tokens)
    rows = informed(tokens)
    pull = (tokens.per_sequence(tokens.advantages.expand_as(gap)) * tokens.per_sequence(gap)).double()
    aligned = {} if tokens.teacher_span is None else {"teacher/aligned": Mean.of(reached(tokens).float(), tokens.mask)}
    return {
        **aligned,
        "teacher/gap": Mean.of(gap, reached(tokens)),
        "teacher/informed": Mean.of(rows),
        "teacher/agreement": Mean(pull.sum().item(), pull.abs().sum().item()),
    }
