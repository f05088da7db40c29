"""An algorithm is a record of small parts; changing one is `.replace(part=...)`. Every gradient is that of the whole step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from covey.algorithms.advantages import GroupNormalized
from covey.algorithms.aggregation import token_mean
from covey.algorithms.composing import is_apart, metrics_of, prepared_in, recalled, remembered, zeroed
from covey.algorithms.control import Controller, controllers_in, settled
from covey.algorithms.critic import Critic, with_targets
from covey.algorithms.declared import expect_advantages, expect_parts, expect_per_token
from covey.algorithms.kl import KL, as_kl
from covey.algorithms.needs import Needs, needs_of
from covey.algorithms.objectives import Clipped
from covey.algorithms.ratios import approximate_kl
from covey.algorithms.reference import keep
from covey.algorithms.teacher_signals import Reshaped, signal_metrics
from covey.algorithms.teachers import TeacherRole, role_of
from covey.algorithms.token_advantages import reward_to_go, token_rewards
from covey.errors import ConfigError, did_you_mean
from covey.types import (
    Advantage,
    Aggregate,
    Mean,
    Metric,
    Objective,
    ReferenceRule,
    Regularizer,
    Scores,
    StepReport,
    Sum,
    TokenBatch,
    Totals,
    Weight,
)

_SINGLE = ("advantage", "objective", "aggregate", "kl", "reference", "critic", "teacher")
_MANY = ("regularizers", "weights")
_OUTSIDE = ("mask", "observed", "observed_logp")
"""Fields of a batch that are not about the tokens that count."""
_MEMORY = "advantage/"
"""Prefix of an advantage's memory among the states of coefficients."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Algorithm: the path from rewards to gradients.

    `loss = aggregate(objective x weights) + aggregate(KL) + sum of aggregate(regularizer)`, plus the critic's own. Weights
    carry no gradient and never touch the KL. A part is a function, or a frozen dataclass when it has parameters; it may also
    have `metrics(tokens)`, `prepare(tokens, totals)` and `needs` (see `composing.py`). `kl` also takes a number (k3 with that
    coefficient) or a bare estimator.
    """

    advantage: Advantage = field(default_factory=GroupNormalized)
    """scores -> [P, G] or [P, G, T]"""
    objective: Objective = field(default_factory=Clipped)
    """tokens -> [N, T] or [N, 1]"""
    aggregate: Aggregate = token_mean
    """(per_token, tokens, totals) -> scalar share"""
    kl: KL | None = None
    regularizers: tuple[Regularizer, ...] = ()
    """tokens -> [N, T], already weighted. One with an `aggregate` of its own is averaged by that."""
    weights: tuple[Weight, ...] = ()
    """tokens -> [N, T] or [N, 1]"""
    reference: ReferenceRule = keep
    """report -> alpha"""
    critic: Critic | None = None
    teacher: TeacherRole | None = None
    """Teacher of parts that read `teacher_logp`; a distillation is one itself."""
    target_kl: float | None = None
    """Skip the rest of a rollout once the KL from the policy that sampled it (k3, nats a token) exceeds this."""
    name: str = "custom"

    def __post_init__(self) -> None:
        for slot in _MANY:
            value = getattr(self, slot)
            object.__setattr__(self, slot, (value,) if callable(value) else tuple(value))
        if self.kl is not None and not isinstance(self.kl, KL):
            object.__setattr__(self, "kl", as_kl(self.kl))
        if getattr(self.objective, "is_shape", False):
            object.__setattr__(self, "objective", Reshaped(self.objective))
        if self.teacher is not None and not isinstance(self.teacher, TeacherRole):
            object.__setattr__(self, "teacher", TeacherRole(self.teacher))
        expect_parts(self._parts())

    @property
    def has_separate_critic(self) -> bool:
        """True if its critic is a second model, not a head of the policy."""
        return getattr(self.critic, "model", None) == "separate"

    def replace(self, **slots: Any) -> Algorithm:
        """The same algorithm with other parts. Raises ConfigError for a slot that does not exist."""
        names = [item.name for item in fields(self)]
        for slot in slots:
            if slot not in names:
                hint = did_you_mean(slot, names) or f" It has {', '.join(names)}."
                raise ConfigError(f"{slot!r} is no part of an algorithm.{hint}")
        changed = "+".join(slots)
        return replace(self, **{"name": f"{self.name}+{changed}" if slots else self.name, **slots})

    # -- called by the learner ----------------------------------------------------------------------------------------

    def judge(self, scores: Scores) -> tuple[Tensor, Tensor | None]:
        """Advantages [P, G] or [P, G, T], 0 where unscored; and the critic's targets [P, G, T], NaN where unscored, or None without one."""
        judged = self.advantage(scores)
        expect_advantages(self.advantage, judged, scores)
        judged = judged.nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf)
        judged = zeroed(judged, scores.total.isnan())
        if self.critic is None:
            return judged, None
        returns = getattr(self.advantage, "returns", None)
        targets = returns(scores) if callable(returns) else reward_to_go(token_rewards(scores), scores.mask)
        return judged, targets.masked_fill(scores.total.isnan().unsqueeze(-1), torch.nan)

    def loss(self, tokens: TokenBatch, totals: Totals) -> Tensor:
        """This micro-batch's share of the step's loss, without the critic's; shares of all micro-batches add up."""
        tokens = _clean(tokens)
        loss = self._policy_loss(tokens, totals)
        for regularizer in self.regularizers:
            if is_apart(regularizer):
                continue
            per_token = expect_per_token(regularizer, "regularizer", regularizer(tokens), tokens)
            aggregate = getattr(regularizer, "aggregate", None) or self.aggregate
            loss = loss + aggregate(per_token.expand_as(tokens.mask), tokens, totals)
        return loss

    @torch.no_grad()
    def metrics(self, tokens: TokenBatch, totals: Totals) -> dict[str, Metric]:
        """Metrics of this micro-batch, under TRL's names where TRL has one; metrics of micro-batches merge exactly."""
        tokens = _clean(tokens)
        metrics: dict[str, Metric] = {
            "policy_loss": Sum(self._policy_loss(tokens, totals).item()),
            "approx_kl": Mean.of(approximate_kl(tokens), tokens.mask),
            "num_completions": Sum(float(tokens.mask.shape[0])),
        }
        if tokens.entropy is not None:
            metrics["entropy"] = Mean.of(tokens.entropy, tokens.mask)
        if self.kl is not None and (tokens.ref_logp is not None or tokens.full_kl is not None):
            metrics["kl"] = Mean.of(self.kl.measured(tokens), tokens.mask)
        metrics.update(signal_metrics(tokens))
        parts = [self.objective, *self.weights, *self.regularizers]
        for part in parts:
            metrics.update(metrics_of(part, tokens))
        if self.critic is not None and tokens.values is not None and tokens.returns is not None:
            metrics.update(metrics_of(self.critic.error, with_targets(tokens)))
        return metrics

    def prepare(self, whole: TokenBatch, totals: Totals) -> Algorithm:
        """The algorithm with each part that needs statistics of the whole optimizer step fitted to it; `whole` carries no gradient."""
        return prepared_in(self, _SINGLE + _MANY, _clean(whole), totals)

    @property
    def needs(self) -> Needs:
        """Inputs that the parts read: those they list in `needs`, and those that follow from their type."""
        return needs_of(self._parts())

    @property
    def role(self) -> TeacherRole | None:
        """The teacher of all parts; None without one. Raises ConfigError for two, and for parts that lack one."""
        role = role_of(list(self._parts().values()))
        if role is None and self.needs.teacher_logp:
            raise ConfigError(
                "A part learns from a teacher's log-probabilities, and the algorithm has no teacher; add one, such as "
                "teacher=alg.TeacherRole('policy', feedback='best')."
            )
        return role

    # -- coefficients with memory ----------------------------------------------------------------------------------

    def controllers(self) -> dict[str, Controller]:
        """Every coefficient that adapts, by where it is, such as `kl.coefficient`."""
        return controllers_in(self)

    def initial_controllers(self) -> dict[str, float]:
        """Initial state of each adaptive coefficient."""
        return {name: controller.init() for name, controller in self.controllers().items()}

    def resolve(self, values: Mapping[str, float]) -> Algorithm:
        """The algorithm with each adaptive coefficient replaced by its current value, from its state in `values` (its start, where
        absent), and the advantage with its memory.
        """
        memory = {key.removeprefix(_MEMORY): value for key, value in values.items() if key.startswith(_MEMORY)}
        return settled(replace(self, advantage=recalled(self.advantage, memory)) if memory else self, values)

    def advance(self, values: Mapping[str, float], report: StepReport) -> dict[str, float]:
        """State of each adaptive coefficient after the step of `report`; an advantage's memory stays."""
        memory = {key: value for key, value in values.items() if key.startswith(_MEMORY)}
        return memory | {
            name: controller.update(values.get(name, controller.init()), report)
            for name, controller in self.controllers().items()
        }

    def remembered(self, scores: Scores) -> dict[str, float]:
        """State of the advantage's memory after the completions of `scores`; empty where it has none."""
        return {f"{_MEMORY}{key}": value for key, value in remembered(self.advantage, scores).items()}

    def has_left(self, report: StepReport) -> bool:
        """True if the policy's approximate KL from the policy that sampled the completions exceeds `target_kl`."""
        return self.target_kl is not None and report["approx_kl"] > self.target_kl

    # -- inside -------------------------------------------------------------------------------------------------------

    def _policy_loss(self, tokens: TokenBatch, totals: Totals) -> Tensor:
        """Objective, weighted, and KL."""
        per_token = expect_per_token(self.objective, "objective", self.objective(tokens), tokens)
        for weight in self.weights:
            per_token = per_token * expect_per_token(weight, "weight", weight(tokens), tokens).detach()
        if tokens.weight is not None:
            per_token = per_token * tokens.weight
        loss = self.aggregate(self._spread(per_token, tokens), tokens, totals)
        if self.kl is None or self.kl.where != "loss":
            return loss
        measured = expect_per_token(self.kl.estimator, "KL estimator", self.kl.measured(tokens), tokens)
        penalty = self.kl.resolved() * measured
        return loss + self.aggregate(self._spread(penalty, tokens), tokens, totals)

    def _spread(self, per_token: Tensor, tokens: TokenBatch) -> Tensor:
        """[N, T]; a loss of one number a sequence stays so for an aggregate that takes it (`takes_rows`)."""
        return per_token if getattr(self.aggregate, "takes_rows", False) else per_token.expand_as(tokens.mask)

    def _parts(self) -> dict[str, object]:
        """Parts by slot, such as `weights.0`; None in a slot without one."""
        several = {f"{slot}.{index}": part for slot in _MANY for index, part in enumerate(getattr(self, slot))}
        return {slot: getattr(self, slot) for slot in _SINGLE} | several


def _clean(tokens: TokenBatch) -> TokenBatch:
    """The same tokens with 0 where they do not count, so that nothing there can reach a value or a gradient."""
    mask, out = tokens.mask, {}
    for name, value in tokens.tensors().items():
        is_per_token = value.shape == mask.shape and name not in _OUTSIDE
        out[name] = torch.where(mask, value, torch.zeros_like(value)) if is_per_token else value
    return TokenBatch(**out)
