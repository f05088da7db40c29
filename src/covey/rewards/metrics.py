"""What a batch of scored groups says, under TRL's names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from covey.types import Group, Mean, Metric, Spread

_TIED = 1e-8
"""TRL calls a group tied when `torch.isclose(std, 0)`, whose absolute tolerance this is."""


def reward_metrics(
    groups: Sequence[Group], names: Sequence[str], weights: Tensor | Sequence[float]
) -> dict[str, Metric]:
    """Metrics of scored groups, of which `names` [R] and `weights` [R] are the rewards. No groups: an empty dict.

    `rewards/<name>/mean` and `/std`: over the completions that this reward scored. `reward`, `reward_std`: of the weighted
    sum, over completions that any reward scored. `frac_reward_zero_std`: groups whose weighted sums are all equal; they teach
    nothing (a lone scored completion has no deviation and is not counted, as in TRL). `groups/all_pass`, `groups/all_fail`: groups of which every scored completion reached the sum of the positive
    weights (full marks), or stayed at 0 or below. `rewards/unscored`: completions that no reward scored. Standard deviations
    have Bessel's correction, as TRL's.
    """
    if not groups:
        return {}
    if any(group.rewards is None for group in groups):
        raise ValueError("reward_metrics needs scored groups; pass them through the scorer first.")
    weights = torch.as_tensor(weights, dtype=torch.float32)
    scores = torch.cat([group.rewards for group in groups if group.rewards is not None])  # [N, R]
    total = _total(scores, weights)  # [N]
    metrics: dict[str, Metric] = {}
    for index, name in enumerate(names):
        column = scores[:, index]
        metrics[f"rewards/{name}/mean"] = Mean.of(column, ~column.isnan())
        metrics[f"rewards/{name}/std"] = Spread.of(column)
    metrics["reward"] = Mean.of(total, ~total.isnan())
    metrics["reward_std"] = Spread.of(total)
    metrics["rewards/unscored"] = Mean.of(total.isnan())
    return metrics | _group_metrics(
        [_total(group.rewards, weights) for group in groups if group.rewards is not None], weights
    )


def has_signal(group: Group, weights: Tensor | Sequence[float]) -> bool:
    """Whether any two completions of a scored group have different weighted sums; a tied group has no gradient."""
    if group.rewards is None:
        raise ValueError("has_signal needs a scored group; pass it through the scorer first.")
    known = _known(group.rewards, torch.as_tensor(weights, dtype=torch.float32))
    return bool(known.numel() > 1 and known.max() - known.min() > _TIED)


def mean_score(group: Group, weights: Tensor | Sequence[float]) -> float:
    """Mean weighted sum of a scored group over the sum of the positive weights, within 0 and 1; 0 where nothing was scored."""
    weights = torch.as_tensor(weights, dtype=torch.float32)
    known = _known(group.rewards if group.rewards is not None else torch.empty(0, len(weights)), weights)
    full_marks = float(weights.clamp(min=0).sum())
    return min(max(float(known.mean()) / full_marks, 0.0), 1.0) if known.numel() and full_marks else 0.0


def _known(rewards: Tensor, weights: Tensor) -> Tensor:
    total = _total(rewards, weights)
    return total[~total.isnan()]  # [<= G]


def _group_metrics(totals: Sequence[Tensor], weights: Tensor) -> dict[str, Metric]:
    full_marks = float(weights.clamp(min=0).sum())
    tied = passed = failed = 0
    for total in totals:
        known = total[~total.isnan()]  # [<= G]
        if not known.numel():
            continue
        tied += bool(known.numel() > 1 and known.max() - known.min() <= _TIED)
        passed += bool(full_marks > 0 and (known >= full_marks - 1e-6).all())
        failed += bool((known <= 1e-6).all())
    return {
        "frac_reward_zero_std": Mean(tied, len(totals)),
        "groups/all_pass": Mean(passed, len(totals)),
        "groups/all_fail": Mean(failed, len(totals)),
    }


def _total(scores: Tensor, weights: Tensor) -> Tensor:
    """[N], the weighted sum with NaN counting 0, NaN where no reward scored."""
    total = (scores.nan_to_num(0.0) * weights).sum(-1)
    return total.masked_fill(scores.isnan().all(-1), torch.nan)
