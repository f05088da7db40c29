"""Replay of a recorded step's update, as it was or with one change, and its effect on the policy."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covey.algorithms import Algorithm
from covey.doctor.why.recorded import Recorded
from covey.types import Group

Made = tuple[list[Group], Algorithm, float, float | None]
"""Groups to learn from, the algorithm, a factor on the learning rate, a bound on the gradient's norm (None: the run's)."""


FEWEST_GROUPS = 4
"""Groups with signal below which no group is compared with the others, nor left out."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Effect of an update, measured on every completion of the step, by group [P]."""

    grad_norm: float
    """Gradient norm before clipping."""
    moved: np.ndarray[Any, Any]
    """KL (k3, Schulman 2020) of the policy before the update from the one after, nats a token."""
    stale: np.ndarray[Any, Any]
    """KL (k3) of the sampling policy of trained completions from the policy before the update, nats a token."""
    gains: Mapping[str, np.ndarray[Any, Any]]
    """For each reward, to first order, how much the update raises its mean: mean of (reward - group's mean) x change of log-probability."""
    weights: np.ndarray[Any, Any]
    """Sum of the absolute advantages that each group was learned from with; 0 where it was left out."""


class Replay:
    """Makes the step again and again from the same weights and optimizer state."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self._weights = [p.detach().clone() for p in recorded.learner.policy.parameters()]
        self._clip = recorded.learner.max_grad_norm
        self._restore(1.0)
        self.before = self._logp()

    def effect(self, change: Callable[[list[Group], Algorithm], Made]) -> Effect:
        """Effect of the update under a change. The learner is as before the step afterwards."""
        recorded, learner = self.recorded, self.recorded.learner
        groups, algorithm, factor, bound = change(list(recorded.groups), recorded.algorithm)
        self._restore(factor)
        learner.max_grad_norm = self._clip if bound is None else bound
        report = learner.step(groups, algorithm, recorded.step)
        after = self._logp()
        self._restore(1.0)
        learner.max_grad_norm = self._clip
        return self._measured(groups, after, report.metrics["grad_norm"].value)

    def staleness(self) -> list[Tensor]:
        """[G] for each group: k3 of each completion's sampling policy from the policy before the update, nats a token."""
        out = []
        for group, rows in zip(self.recorded.groups, self.before, strict=True):
            drawn = [done.logprobs for done in group.completions]
            out.append(torch.stack([torch.tensor(0.0) if d is None else _k3(now - d, done.written) for now, d, done in zip(rows, drawn, group.completions, strict=True)]))  # fmt: skip
        return out

    def _measured(self, used: Sequence[Group], after: list[list[Tensor]], grad_norm: float) -> Effect:
        sizes = _sizes(used)
        used_ids = {id(done) for group in used for done in group.completions}
        used_tokens = {id(done.token_ids) for group in used for done in group.completions}
        moved, stale, weights = [], [], []
        gains: dict[str, list[float]] = {name: [] for name in self.recorded.reward_names}
        for group, old, new, aged in zip(self.recorded.groups, self.before, after, self.staleness(), strict=True):
            kls = [_k3(a - b, done.written) for a, b, done in zip(new, old, group.completions, strict=True)]
            moved.append(float(torch.stack(kls).mean()))
            learnt = [id(d) in used_ids or id(d.token_ids) in used_tokens for d in group.completions]
            stale.append(float(aged[torch.tensor(learnt)].mean()) if any(learnt) else 0.0)
            weights.append(sum(sizes.get(id(d.token_ids), 0.0) for d in group.completions))
            change = torch.stack(
                [((a - b) * d.written).sum() for a, b, d in zip(new, old, group.completions, strict=True)]
            )
            assert group.rewards is not None
            for r, name in enumerate(self.recorded.reward_names):
                reward = group.rewards[:, r].nan_to_num(0.0)
                gains[name].append(float(((reward - reward.mean()) * change.clamp(-2, 2)).mean()))
        arrays = {name: np.array(values) for name, values in gains.items()}
        return Effect(
            grad_norm=grad_norm, moved=np.array(moved), stale=np.array(stale), gains=arrays, weights=np.array(weights)
        )

    @torch.no_grad()
    def _logp(self) -> list[list[Tensor]]:
        """[P][G] log-probabilities [T] of the completions under the learner's weights."""
        bare = [
            replace(g, completions=tuple(replace(c, old_logp=None) for c in g.completions))
            for g in self.recorded.groups
        ]
        noted = self.recorded.learner.annotate(bare, Algorithm())
        return [[done.old_logp for done in group.completions if done.old_logp is not None] for group in noted]

    def _restore(self, factor: float) -> None:
        learner, tree = self.recorded.learner, self.recorded.state
        learner.forget()
        with torch.no_grad():
            for parameter, value in zip(learner.policy.parameters(), self._weights, strict=True):
                parameter.copy_(value)
        learner.optimizer.load_state_dict(copy.deepcopy(tree["optimizer"]))
        learner.scheduler.load_state_dict(copy.deepcopy(tree["scheduler"]))
        for group in learner.optimizer.param_groups:
            group["lr"] *= factor


def _sizes(groups: Sequence[Group]) -> dict[int, float]:
    """Sum over tokens (1 for a completion's own advantage) of |advantage| of each completion, by the id of its tokens."""
    sizes = {}
    for group in groups:
        for done, advantage in zip(
            group.completions, () if group.advantages is None else group.advantages, strict=False
        ):
            sizes[id(done.token_ids)] = float(advantage.abs().sum())
    return sizes


def _k3(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Mean over tokens of exp(d) - 1 - d."""
    values = torch.where(mask, torch.expm1(log_ratio) - log_ratio, torch.zeros_like(log_ratio))
    return values.sum() / mask.sum().clamp_min(1)
