"""Advantage cases that verl ran, as calls of the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from golden import Case, UnknownCaseError
from torch import Tensor

from covey import algorithms as alg
from covey.algorithms.token_advantages import optimal_token_baseline
from covey.types import Scores


class Layout:
    """Rows [N, ...] in groups [P, G, ...], padded, and back."""

    def __init__(self, group: Tensor) -> None:
        self.rows = [torch.nonzero(group == number).flatten() for number in group.unique()]
        self.size = max(len(rows) for rows in self.rows)

    def fold(self, x: Tensor, fill: float = 0.0) -> Tensor:
        out = x.new_full((len(self.rows), self.size, *x.shape[1:]), fill)
        for p, rows in enumerate(self.rows):
            out[p, : len(rows)] = x[rows]
        return out

    def unfold(self, x: Tensor) -> Tensor:
        out = x.new_zeros((sum(len(rows) for rows in self.rows), *x.shape[2:]))
        for p, rows in enumerate(self.rows):
            out[rows] = x[p, : len(rows)]
        return out


def layout_of(case: Case, num_rows: int) -> Layout:
    group = case.tensor("group")
    return Layout(torch.arange(num_rows) if group is None else group)


def scores_of(case: Case, layout: Layout, rewards: Tensor, mask: Tensor, **more: Any) -> Scores:
    """Rewards of single tokens; the functions gave nothing (and rows that only pad a group are unscored)."""
    return Scores(
        per_function=layout.fold(torch.zeros(len(rewards), 1, dtype=torch.float64), torch.nan),
        weights=torch.ones(1, dtype=torch.float64),
        mask=layout.fold(mask),
        per_token=layout.fold(rewards),
        **more,
    )


def group_scale(case: Case) -> Any:
    return "group" if case.option("norm_adv_by_std_in_grpo", True) else "none"


ESTIMATORS: dict[str, Callable[[Case], Any]] = {
    "grpo": lambda case: alg.GroupNormalized(group_scale(case), 1e-6, "keep"),
    "grpo_vectorized": lambda case: alg.GroupNormalized(group_scale(case), 1e-6, "keep", 1e-6),
    "grpo_passk": lambda case: alg.PassAtK(group_scale(case) == "group", 1e-6),
    "reinforce_plus_plus_baseline": lambda case: alg.ReinforcePlusPlus(baseline=True, keeps_single=True),
    "rloo": lambda case: alg.LeaveOneOut(singleton="keep"),
    "rloo_vectorized": lambda case: alg.LeaveOneOut(singleton="zero"),
    "opo": lambda case: alg.OPO(singleton="keep"),
    "gpg": lambda case: alg.GPG(singleton="keep"),
    "reinforce_plus_plus": lambda case: alg.ReinforcePlusPlus(case.option("gamma", 1.0), across_gaps=False),
    "remax": lambda case: alg.ReMax(),
    "gae": lambda case: alg.GAE(case.option("gamma", 1.0), case.option("lam", 1.0)),
}


def advantage(case: Case) -> dict[str, Any]:
    """Advantages, spread over the tokens that count, and returns, which are the same unless the estimator has its own."""
    name, rewards, mask = (
        case.option("estimator", case.algorithm),
        case.need("token_level_rewards"),
        case.need("mask").bool(),
    )
    layout = layout_of(case, len(rewards))
    more: dict[str, Any] = {}
    if (baselines := case.tensor("reward_baselines")) is not None:
        layout = Layout(torch.arange(len(rewards)))  # one a row: each row is a group of its own
        more["greedy"] = baselines
    if (values := case.tensor("values")) is not None:
        more["values"] = layout.fold(values)
    scores = scores_of(case, layout, rewards, mask, **more)
    if name.endswith("optimal_token_baseline"):
        return token_baseline(case, layout, scores, written_only=name.startswith("tir"))
    if name not in ESTIMATORS:
        raise UnknownCaseError(f"estimator {name!r} is not known")
    estimator = ESTIMATORS[name](case)
    judged, _ = alg.Algorithm(advantage=estimator).judge(scores)
    judged = layout.unfold(judged if judged.ndim == 3 else judged.unsqueeze(-1) * scores.mask)
    has_own = hasattr(estimator, "returns") and name != "reinforce_plus_plus_baseline"
    return {"advantages": judged, "returns": layout.unfold(estimator.returns(scores)) if has_own else judged}


def token_baseline(case: Case, layout: Layout, scores: Scores, written_only: bool) -> dict[str, Any]:
    correction = case.tensor("rollout_is_weights")
    judged = optimal_token_baseline(
        scores,
        1.0 - 2.0 * layout.fold(case.need("old_logp")).exp() + layout.fold(case.need("sum_pi_squared")),
        correction=None if correction is None else layout.fold(correction),
        written_only=written_only,
        handle_zero_tail=bool(case.option("handle_zero_tail", False)),
    )
    return {"advantages": layout.unfold(judged), "returns": layout.unfold(alg.ReMax().returns(scores))}
