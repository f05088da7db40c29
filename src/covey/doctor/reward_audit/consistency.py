"""Reliability of a run's rewards: recorded completions scored again, by the same rewards and by other verifiers.

A reward that gives other verdicts for the same text puts noise into the advantages. With `v` the variance of a completion's score
over repeats and `s` the variance of scores within a group, the reliability is `r = 1 - v / s` (classical test theory: the share
of what is seen that repeats; Spearman 1904), and the same signal needs `1 / r` times the completions.

Of a verifier with false positives `p0` and false negatives `p1` the expected score is `p0 + (1 - p0 - p1) * truth`, so the
advantages keep `1 - p0 - p1` of their size (Natarajan et al. 2013, "Learning with noisy labels").
"""

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from covey.doctor.why.recorded import groups_of
from covey.errors import ConfigError, RunFolderError
from covey.evaluation.intervals import Estimate, bounded_mean
from covey.rewards import Scorer
from covey.runs import rollouts
from covey.types import Group

Item = TypeVar("Item")
_SAME = 1e-6
_DRAWS = 1000


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """One reward asked several times."""

    name: str
    differ: Estimate
    """Share of completions with another score, by group."""
    reliability: Estimate
    """`1 - v / s`; NaN where no group has different scores."""
    woken: Estimate
    """Share of groups that are tied in one scoring and not in another: their advantages are noise alone."""
    unscored: int
    """Completions without a score in some scoring; they are left out above."""
    examples: tuple[tuple[str, str, tuple[float, ...]], ...]
    """Prompt, completion and scores of those furthest apart."""

    @property
    def cost(self) -> float:
        """Completions that the same signal needs, relative to a reward without noise."""
        return 1 / self.reliability.value if self.reliability.value > 0 else math.inf


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Verdicts of one reward compared with those of another verifier."""

    name: str
    other: str
    differ: Estimate
    """Share of completions with another verdict, a verdict being a score above the middle of the scores that occur."""
    paid_wrong: Estimate
    """False positive rate: share of completions rejected by `other` that the reward pays."""
    missed: Estimate
    """False negative rate: share of completions paid by `other` that the reward rejects."""
    agreement: float
    """Cosine of the two centred scores within groups: how much of the advantages point the same way."""
    examples: tuple[tuple[str, str, tuple[float, ...]], ...]

    @property
    def retained(self) -> float:
        """`1 - p0 - p1`, with `other` as the truth."""
        return 1 - self.paid_wrong.value - self.missed.value


def recorded_groups(run: Path, steps: tuple[int, int | None], sample: int) -> tuple[list[Group], list[str]]:
    """Groups of a run's rollouts with their recorded rewards, at most `sample` completions from all over the steps.

    Of more files than that has groups, as many are read. Raises RunFolderError where there are none.
    """
    folder = run / "rollouts"
    selected = [s for s in rollouts.steps(folder) if s >= steps[0] and (steps[1] is None or s <= steps[1])]
    groups, names = list[Group](), list[str]()
    sizes = (len(rollouts.by_group(rows)[0]) for rows in rollouts.read_each(folder, selected))
    count = max(1, sample // next(sizes, 1))
    for rows in rollouts.read_each(folder, _evenly(selected, count)):
        names = [name.removeprefix("reward/") for name in rows[0] if name.startswith("reward/")]
        groups += groups_of(rows, names)
    if not groups:
        raise RunFolderError(f"{run} has no rollouts of these steps; a run writes them as --rollout-log-steps says.")
    return _evenly(groups, count), names


def _evenly(items: list[Item], count: int) -> list[Item]:
    """`count` of the items at equal distances; all of fewer."""
    return items if len(items) <= count else [items[i * len(items) // count] for i in range(count)]


def scores_of(group: Group) -> np.ndarray:
    """[G, R] of a scored group."""
    assert group.rewards is not None
    return np.asarray(group.rewards.double())


def scored_again(groups: Sequence[Group], rewards: Sequence[Any], times: int, seconds: float) -> list[np.ndarray]:
    """`times` scorings of all groups: each a list of [G, R] arrays, one a group, NaN where there is no score."""
    scorings = []
    for _ in range(times):
        with closing(Scorer.of(list(rewards), timeout_seconds=seconds)) as scorer:
            scorings.append([scores_of(group) for group in scorer.score(groups)])
    return [np.concatenate([scores[g][None] for scores in scorings]) for g in range(len(groups))]  # of [times, G, R]


def repeats_of(name: str, groups: Sequence[Group], scores: Sequence[np.ndarray]) -> Repeats:
    """Consistency of one reward over repeated calls. `scores`: for each group [times, G], recorded scores first where known."""
    clean = [group_scores[:, ~np.isnan(group_scores).any(0)] for group_scores in scores]
    used = [group_scores for group_scores in clean if group_scores.shape[1] > 0]
    differ = [float((np.ptp(group_scores, axis=0) > _SAME).mean()) for group_scores in used]
    wide = [group_scores for group_scores in used if group_scores.shape[1] > 1]
    noise = np.array([group_scores.var(axis=0, ddof=1).mean() for group_scores in wide])
    spread = np.array([group_scores.var(axis=1, ddof=1).mean() for group_scores in wide])
    tied = [np.ptp(group_scores, axis=1) <= _SAME for group_scores in wide]
    return Repeats(
        name=name,
        differ=bounded_mean(differ),
        reliability=_ratio(noise, spread),
        woken=bounded_mean([float(is_tied.any() and not is_tied.all()) for is_tied in tied]),
        unscored=sum(a.shape[1] - b.shape[1] for a, b in zip(scores, clean, strict=True)),
        examples=_furthest(groups, scores),
    )


def compare(
    name: str, other: str, groups: Sequence[Group], mine: Sequence[np.ndarray], theirs: Sequence[np.ndarray]
) -> Comparison:
    """Compare one scoring [G] a group of the reward with one of another verifier."""
    pairs = [np.stack([a, b]) for a, b in zip(mine, theirs, strict=True)]
    clean = [pair[:, ~np.isnan(pair).any(0)] for pair in pairs]
    paid = [pair > middles[:, None] for middles in [_middles(clean)] for pair in clean]
    share = lambda of: bounded_mean([float(x.mean()) for x in of if x.size])
    centred = np.concatenate([pair - pair.mean(axis=1, keepdims=True) for pair in clean if pair.size], axis=1)
    norms = np.linalg.norm(centred, axis=1)
    return Comparison(
        name=name,
        other=other,
        differ=share([p[0] != p[1] for p in paid]),
        paid_wrong=share([p[0][~p[1]] for p in paid]),
        missed=share([~p[0][p[1]] for p in paid]),
        agreement=float(centred[0] @ centred[1] / norms.prod()) if norms.all() else math.nan,
        examples=_furthest(groups, pairs),
    )


def _middles(pairs: Sequence[np.ndarray]) -> np.ndarray:
    """[2], half way between the least and the largest score of each side."""
    joined = np.concatenate([pair for pair in pairs if pair.size] or [np.full((2, 1), math.nan)], axis=1)
    if np.isnan(joined).all():
        raise ConfigError("No completion has a score from both verifiers; there is nothing to compare.")
    middles: np.ndarray = (joined.min(axis=1) + joined.max(axis=1)) / 2
    return middles


def _ratio(noise: np.ndarray, spread: np.ndarray) -> Estimate:
    """`1 - v / s` over groups, with a percentile interval of groups drawn again."""
    if not spread.sum() > 0:
        return Estimate(math.nan, math.nan, math.nan, len(noise))
    drawn = np.random.default_rng(0).integers(len(noise), size=(_DRAWS, len(noise)))
    totals = spread[drawn].sum(axis=1)
    ratios = 1 - noise[drawn].sum(axis=1)[totals > 0] / totals[totals > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    value, low, high = (float(np.clip(x, 0, 1)) for x in (1 - noise.sum() / spread.sum(), low, high))
    return Estimate(value, low, high, len(noise))


def _furthest(
    groups: Sequence[Group], scores: Sequence[np.ndarray], most: int = 3
) -> tuple[tuple[str, str, tuple[float, ...]], ...]:
    """Prompt, completion and scores of the completions whose scores are furthest apart."""
    apart = []
    for group, of_group in zip(groups, scores, strict=True):
        gaps = np.nan_to_num(np.ptp(of_group, axis=0))
        for i in np.flatnonzero(gaps > _SAME):
            rounded = tuple(round(float(x), 6) for x in of_group[:, i])
            apart.append((float(gaps[i]), group.prompt.text or "", group.completions[i].text, rounded))
    apart.sort(key=lambda entry: -entry[0])
    once = {entry[1:3]: entry[1:] for entry in reversed(apart)}  # the same answer twice says nothing more
    return tuple(reversed(once.values()))[:most]
