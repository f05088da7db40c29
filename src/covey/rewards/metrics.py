"""Metrics of a batch of scored groups, under TRL's names."""

from collections.abc import Sequence

import torch
from torch import Tensor

from covey.rewards.scales import Scale, seen_scales, verdicts
from covey.types import Group, Mean, Metric, Spread
from covey.types.values import weighted_total

_TIED = 1e-8
"""TRL calls a group tied when `torch.isclose(std, 0)`, whose absolute tolerance this is."""


def reward_metrics(
    groups: Sequence[Group],
    names: Sequence[str],
    weights: Tensor | Sequence[float],
    scales: Sequence[Scale | None] | None = None,
    clip: tuple[float, float] | None = None,
) -> dict[str, Metric]:
    """Metrics of scored groups, of which `names` [R] and `weights` [R] are the rewards. No groups: an empty dict.

    `scales` [R] as the scorer knows them; None: as these groups show them. `clip`: bounds of the sums that advantages see.

    `rewards/<name>/mean` and `/std`: over the completions that this reward scored. `reward`, `reward_std`: of the weighted
    sum, over completions that any reward scored (`complete_totals`). `frac_reward_zero_std`: groups whose weighted sums are all equal; they teach
    nothing (a lone scored completion has no deviation and is not counted, as in TRL, which counts groups of size 1). `groups/all_pass`, `groups/all_fail`:
    groups of which every scored completion is right, or wrong, by the rewards whose scale is known (`verdicts`); without any
    these two do not exist. `rewards/unscored`: completions that no reward scored. Standard deviations
    have Bessel's correction, as TRL's.
    """
    if not groups:
        return {}
    if any(group.rewards is None for group in groups):
        raise ValueError("reward_metrics needs scored groups; pass them through the scorer first.")
    weights = torch.as_tensor(weights, dtype=torch.float32)
    scores = torch.cat([group.rewards for group in groups if group.rewards is not None])  # [N, R]
    total = weighted_total(scores, weights)  # [N]
    metrics: dict[str, Metric] = {}
    measured = torch.cat([group.recorded for group in groups if group.recorded is not None])  # [N, R]
    for index, name in enumerate(names):
        column = measured[:, index]
        metrics[f"rewards/{name}/mean"] = Mean.of(column, ~column.isnan())
        metrics[f"rewards/{name}/std"] = Spread.of(column)
    whole = torch.cat([complete_totals(group, weights) for group in groups])  # [N]
    metrics["reward"] = Mean.of(whole, ~whole.isnan())
    metrics["reward_std"] = Spread.of(whole)
    metrics["rewards/unscored"] = Mean.of(total.isnan())
    rewards = [group.rewards for group in groups if group.rewards is not None]
    scored = [_scored_totals(each, weights, clip) for each in rewards]
    tied = sum(bool(len(totals) > 1 and totals.max() - totals.min() <= _TIED) for totals in scored)
    metrics["frac_reward_zero_std"] = Mean(tied, len(groups))
    return metrics | _verdict_metrics(rewards, weights, seen_scales(groups, len(names)) if scales is None else scales)


def totals_of(group: Group, weights: Tensor) -> Tensor:
    """[G], the weighted sum of a group's rewards, an unscored one counting 0; NaN where none scored."""
    if group.rewards is None:
        return torch.full((group.size,), torch.nan)
    return weighted_total(group.rewards, weights)


def complete_totals(group: Group, weights: Tensor) -> Tensor:
    """[G], `totals_of`, NaN also where a reward failed: the sum would be lower by it."""
    totals = totals_of(group, weights)
    return totals if group.lost is None else totals.masked_fill(group.lost, torch.nan)


def has_signal(
    group: Group,
    weights: Tensor | Sequence[float],
    clip: tuple[float, float] | None = None,
    rounding: float = _TIED,
) -> bool:
    """True if any two completions of a scored group have different weighted sums, within `clip`; a tied group has no gradient."""
    if group.rewards is None:
        raise ValueError("has_signal needs a scored group; pass it through the scorer first.")
    totals = _scored_totals(group.rewards, torch.as_tensor(weights, dtype=torch.float32), clip)
    return bool(totals.numel() > 1 and totals.max() - totals.min() > rounding)


def mean_score(group: Group, weights: Tensor | Sequence[float]) -> float:
    """Mean over a scored group of the weighted sum over the positive weights of the rewards that scored, within 0 and 1; 0 without any."""
    weights = torch.as_tensor(weights, dtype=torch.float32)
    rewards = group.rewards if group.rewards is not None else torch.empty(0, len(weights))
    full_marks = (weights.clamp(min=0) * ~rewards.isnan()).sum(-1)  # [G]
    shares = (weighted_total(rewards, weights) / full_marks)[full_marks > 0]
    return min(max(float(shares.mean()), 0.0), 1.0) if shares.numel() else 0.0


def _scored_totals(rewards: Tensor, weights: Tensor, clip: tuple[float, float] | None) -> Tensor:
    total = weighted_total(rewards, weights) if clip is None else weighted_total(rewards, weights).clamp(*clip)
    return total[~total.isnan()]  # [<= G]


def _verdict_metrics(rewards: Sequence[Tensor], weights: Tensor, scales: Sequence[Scale | None]) -> dict[str, Metric]:
    passed = failed = 0
    for group_rewards in rewards:
        right_wrong = verdicts(group_rewards, weights, scales)
        if right_wrong is None:
            return {}
        right, wrong = (
            verdict[~group_rewards.isnan().all(-1)] for verdict in right_wrong
        )  # [<= G], scored completions only
        passed += bool(right.numel() and right.all())
        failed += bool(wrong.numel() and wrong.all())
    return {"groups/all_pass": Mean(passed, len(rewards)), "groups/all_fail": Mean(failed, len(rewards))}
