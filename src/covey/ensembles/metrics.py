"""Metrics of each ensemble member's contribution."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from covey.ensembles.member import Role
from covey.types import Completion, EffectiveSize, Group, Mean, Metric, Sum


@dataclass(eq=False)
class Tally:
    """Counts of completions requested from members since the last `take`, and of their outcomes."""

    counts: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, samples: int, written: Sequence[Group]) -> None:
        """Count a member's completions for some prompts, of which it was to write `samples` each; what is missing failed."""
        for key, count in (
            ("prompts", len(written)),
            ("drawn", sum(max(samples, group.size) for group in written)),
            ("lost", sum(max(0, samples - group.size) for group in written)),
        ):
            self.counts[f"{name}/{key}"] = self.counts.get(f"{name}/{key}", 0.0) + count

    def take(self) -> dict[str, Metric]:
        counts, self.counts = self.counts, {}
        return {name: Sum(value) for name, value in counts.items()}


def member_metrics(
    groups: Sequence[Group], roles: Mapping[str, Role], counts: Mapping[str, Metric], num_prompts: int
) -> dict[str, Metric]:
    """Metrics of groups with advantages and weights, baselines included: `ensemble/<member>/...`.

    `reward`: mean weighted reward. `win_rate`: chance that a completion of the member has a higher reward than one of the
    policy in its group, ties counting half. `share`: of all completions that are pushed up, those of the member. `used`: of the
    completions that it was asked for, those that carry a gradient (a baseline: that differ from the policy's mean). `ess`:
    effective sample size of the importance weights. `lost`: completions that could not be encoded again, or did not come.
    `asked`: prompts that it was asked.
    """
    metrics: dict[str, Metric] = {}
    pushed = sum(_pushes_up(group, i, roles) for group in groups for i in range(group.size))
    for name, role in roles.items():
        at = f"ensemble/{name}"
        of_member = [
            (group, i)
            for group in groups
            for i, completion in enumerate(group.completions)
            if completion.source == name
        ]
        drawn, lost, prompts_sent = (_count(counts, f"{name}/{key}") for key in ("drawn", "lost", "prompts"))
        metrics[f"{at}/asked"] = Mean(prompts_sent, num_prompts)
        if not drawn:
            continue
        totals = torch.tensor([_total(group, i) for group, i in of_member])
        metrics |= {
            f"{at}/lost": Mean(lost, drawn),
            f"{at}/reward": Mean.of(totals, ~totals.isnan()),
            f"{at}/win_rate": _wins(of_member),
            f"{at}/used": Mean(sum(_is_used(group, i, role) for group, i in of_member), drawn),
        }
        if role != "baseline":
            metrics[f"{at}/share"] = Mean(sum(_pushes_up(group, i, roles) for group, i in of_member), pushed)
        weights = [group.completions[i].weight for group, i in of_member]
        if role == "sibling" and any(weight is not None for weight in weights):
            metrics[f"{at}/ess"] = EffectiveSize.of(torch.cat([weight for weight in weights if weight is not None]))
    return metrics


def _count(counts: Mapping[str, Metric], name: str) -> float:
    return counts[name].value if name in counts else 0.0


def _total(group: Group, i: int) -> float:
    return math.nan if group.totals is None else float(group.totals[i])


def _of_policy(group: Group) -> Tensor:
    """[<= G], totals of the policy's own completions that were scored."""
    totals = torch.tensor(
        [_total(group, i) for i, completion in enumerate(group.completions) if completion.source == "policy"]
    )
    return totals[~totals.isnan()]


def _wins(of_member: Sequence[tuple[Group, int]]) -> Mean:
    won = pairs = 0.0
    for group, i in of_member:
        total, theirs = _total(group, i), _of_policy(group)
        if math.isnan(total):
            continue
        won += float(theirs.lt(total).sum()) + 0.5 * float(theirs.eq(total).sum())
        pairs += len(theirs)
    return Mean(won, pairs)


def _advantage(group: Group, i: int) -> Tensor:
    return torch.zeros(()) if group.advantages is None else group.advantages[i]


def _has_weight(completion: Completion) -> bool:
    return completion.weight is None or bool((completion.weight > 0).any())


def _pushes_up(group: Group, i: int, roles: Mapping[str, Role]) -> bool:
    completion = group.completions[i]
    return (
        roles.get(completion.source) != "baseline"
        and _has_weight(completion)
        and bool((_advantage(group, i) > 0).any())
    )


def _is_used(group: Group, i: int, role: Role) -> bool:
    if role == "baseline":
        theirs = _of_policy(group)
        return bool(len(theirs)) and abs(_total(group, i) - float(theirs.mean())) > 1e-8
    return _has_weight(group.completions[i]) and bool((_advantage(group, i) != 0).any())
