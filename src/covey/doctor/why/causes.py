"""Troubles of a step, and the single changes that remove them: each replayed, compared, ranked."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from covey.algorithms import Algorithm
from covey.doctor.why.recorded import Recorded, judged_again
from covey.doctor.why.replay import FEWEST_GROUPS, Effect, Made, Replay
from covey.doctor.why.slices import Contradiction, contradictions
from covey.types import Group

MOST_MOVED = 0.05
"""Nats a token that one update may move the policy; PPO's usual target over a whole rollout is 0.01 to 0.02."""
MOST_STALE = 0.02
"""Largest KL between the sampling policy and the policy being trained, nats a token."""
SPIKE = 5.0
"""Times the median gradient norm of the steps before."""
OUTSIZED = 10.0
"""Times the median sum of absolute advantages of the groups with signal; divided by their deviation, groups differ by sqrt(G) at most."""
_FEWEST_BEFORE = 3
_GROUPS_TRIED = 4
_RESAMPLES = 400
_REMOVED = 0.5


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """One cause, in words, with the test that tells whether a replay still shows it."""

    said: str
    measure: Callable[[Effect], np.ndarray[Any, Any]]
    """[P], or [1] where it is no mean over groups."""
    limit: float
    """Below it all is well."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A counterfactual: the step with one change."""

    kind: str
    """learning_rate, reward, group, slice, stale, scale, reference or clip."""
    said: str
    apply: Callable[[list[Group], Algorithm], Made]


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change with the share of the trouble that it removes: 1 brings every measure below its limit."""

    change: Change
    share: float
    """Mean over troubles; one that a change makes worse counts as 0, because each may have a cause of its own."""
    low: float
    high: float
    """95% bootstrap interval over groups."""
    removes: tuple[int, ...]
    """Places of the troubles of which it removes half or more, with an interval above 0."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Troubles of a step, and the changes that were tried, best first."""

    troubles: tuple[tuple[str, float, float], ...]
    """(description, value, limit)."""
    remedies: tuple[Remedy, ...]
    replayed: tuple[float, float | None]
    """Gradient norm of the replay, and as the run recorded it."""
    left_out: tuple[str, ...]


def diagnose(recorded: Recorded) -> Diagnosis:
    """Replay the step as it was, name the causes, then try each change."""
    replay = Replay(recorded)
    base = replay.effect(lambda groups, algorithm: (groups, algorithm, 1.0, None))
    against = contradictions(recorded)
    troubles = [*_troubles(recorded, base), *_troubles_of_slices(against)]
    slices = [_without("slice", f"the prompts with {c.said} left out", c.places) for c in against]
    changes = [*_changes(recorded, replay), *slices] if troubles else []
    remedies = [_remedy(change, troubles, base, replay.effect(change.apply)) for change in changes]
    kinds = ("stale", "slice", "group", "reward", "scale", "reference", "clip", "learning_rate")
    order = {kind: place for place, kind in enumerate(kinds)}
    ranked = sorted(remedies, key=lambda remedy: (-round(remedy.share, 1), order[remedy.change.kind], -remedy.share))
    recorded_norm = recorded.metrics.get("grad_norm")
    left = (
        ()
        if recorded.can_judge
        else ("rewards off and unscaled advantages: judged again, advantages differ from the recorded ones",)
    )
    values = tuple((trouble.said, float(trouble.measure(base).mean()), trouble.limit) for trouble in troubles)
    return Diagnosis(troubles=values, remedies=tuple(ranked), replayed=(base.grad_norm, recorded_norm), left_out=left)


def _troubles(recorded: Recorded, base: Effect) -> Iterator[Trouble]:
    if base.stale.mean() > MOST_STALE:
        yield Trouble(
            said="completions were drawn by another policy than the one that learns (nats a token)",
            measure=lambda e: e.stale,
            limit=MOST_STALE,
        )
    if base.moved.mean() > MOST_MOVED:
        yield Trouble(
            said="the update moves the policy too far (nats a token)", measure=lambda e: e.moved, limit=MOST_MOVED
        )
    before = recorded.earlier["grad_norm"]
    if len(before) >= _FEWEST_BEFORE and base.grad_norm > (limit := SPIKE * statistics.median(before)):
        yield Trouble(
            said=f"the gradient's norm is over {SPIKE:g} times the median of the steps before",
            measure=lambda e: np.array([e.grad_norm]),
            limit=limit,
        )
    if _outsized(base)[0] > OUTSIZED:
        yield Trouble(
            said="a group outweighs the others (its sum of absolute advantages, in medians of the groups)",
            measure=_outsized,
            limit=OUTSIZED,
        )
    for name, gains in base.gains.items():
        if len(base.gains) > 1 and _interval(gains)[1] < 0:
            yield Trouble(
                said=f"the update lowers the reward {name} (to first order; shown as minus its change)",
                measure=lambda e, name=name: -e.gains[name],  # type: ignore[misc]
                limit=0.0,
            )


def _troubles_of_slices(against: list[Contradiction]) -> Iterator[Trouble]:
    for contradiction in against:
        yield Trouble(
            said=f"prompts with {contradiction.said} are paid for the opposite of what similar completions of other prompts are paid for "
            f"(p = {contradiction.p_value:.1g}; their share of the step's absolute advantages)",
            measure=partial(_share_of, contradiction),
            limit=0.0,
        )


def _share_of(against: Contradiction, effect: Effect) -> Any:
    """[P] parts of the step's sum of absolute advantages that a slice has, times P."""
    inside = np.isin(np.arange(len(effect.weights)), against.places)
    return np.where(inside, effect.weights, 0.0) / max(effect.weights.mean(), 1e-12)


def _outsized(effect: Effect) -> Any:
    """[1] the largest group by absolute advantages, in medians of those with signal; 1 where they are few."""
    loud = effect.weights[effect.weights > 0]
    return np.array([loud.max() / np.median(loud) if len(loud) >= FEWEST_GROUPS else 1.0])


def _changes(recorded: Recorded, replay: Replay) -> Iterator[Change]:
    yield Change(kind="learning_rate", said="the learning rate halved", apply=lambda g, a: (g, a, 0.5, None))
    yield Change(kind="learning_rate", said="a tenth of the learning rate", apply=lambda g, a: (g, a, 0.1, None))
    if before := recorded.earlier["grad_norm"]:
        bound = statistics.median(before)
        yield Change(
            kind="clip",
            said=f"the gradient clipped at {bound:.3g}, the median so far",
            apply=lambda g, a: (g, a, 1.0, bound),
        )
    aged = replay.staleness()
    fresh = [(rows <= MOST_STALE).nonzero().flatten().tolist() for rows in aged]
    if sum(map(len, fresh)) < sum(group.size for group in recorded.groups):
        keep = lambda g, a: ([group.take(i) for group, i in zip(g, fresh, strict=True) if i], a, 1.0, None)
        yield Change(kind="stale", said="completions drawn by another policy left out", apply=keep)
    weight = [0.0 if g.advantages is None else float(g.advantages.abs().max()) for g in recorded.groups]
    loud = [i for i in range(len(weight)) if weight[i] > 0]
    few = len(loud) < FEWEST_GROUPS  # without one of so few there is hardly an update, whatever the cause
    for index in [] if few else sorted(loud, key=lambda i: -weight[i])[:_GROUPS_TRIED]:
        yield _without_groups(recorded, [index])
    if len(heavy := _heavy(recorded)) > 1:  # each of them hides behind the others
        yield _without_groups(recorded, heavy)
    if recorded.algorithm.kl is not None:
        yield Change(
            kind="reference",
            said="a fresh reference (the policy before the update)",
            apply=lambda g, a: (_fresh_reference(g, replay), a, 1.0, None),
        )
    if recorded.can_judge:
        yield from _rejudge(recorded)


def _heavy(recorded: Recorded) -> list[int]:
    """Places of the groups that outweigh the others, as `_outsized` measures it."""
    sums = np.array([0.0 if g.advantages is None else float(g.advantages.abs().sum()) for g in recorded.groups])
    loud = sums[sums > 0]
    return [] if len(loud) < FEWEST_GROUPS else np.flatnonzero(sums > OUTSIZED * np.median(loud)).tolist()


def _without_groups(recorded: Recorded, places: list[int]) -> Change:
    uids = ", ".join(recorded.groups[i].prompt.uid for i in places)
    sentence = f"the group of prompt {uids} left out" if len(places) == 1 else f"the groups of prompts {uids} left out"
    return _without("group", sentence, places)


def _without(kind: str, sentence: str, places: Sequence[int]) -> Change:
    rest = lambda g, a: ([group for i, group in enumerate(g) if i not in places], a, 1.0, None)
    return Change(kind=kind, said=sentence, apply=rest)


def _rejudge(recorded: Recorded) -> Iterator[Change]:
    for index, name in enumerate(recorded.reward_names):
        if len(recorded.reward_names) > 1 and recorded.weights[index] != 0:
            weights = recorded.weights.clone()
            weights[index] = 0.0
            off = lambda g, a, weights=weights: (judged_again(g, a, weights), a, 1.0, None)
            yield Change(kind="reward", said=f"the reward {name} off", apply=off)
    advantage = recorded.algorithm.advantage
    if getattr(advantage, "scale", "none") not in ("none", False):
        plain = replace(advantage, scale="none")  # type: ignore[type-var]
        anew = lambda g, a: (judged_again(g, a.replace(advantage=plain), recorded.weights), a, 1.0, None)
        yield Change(kind="scale", said="advantages not divided by their deviation", apply=anew)


def _fresh_reference(groups: list[Group], replay: Replay) -> list[Group]:
    return [
        replace(
            group, completions=tuple(replace(c, ref_logp=logp) for c, logp in zip(group.completions, rows, strict=True))
        )
        for group, rows in zip(groups, replay.before, strict=True)
    ]


def _remedy(change: Change, troubles: list[Trouble], base: Effect, changed: Effect) -> Remedy:
    pairs = [(t.measure(base), t.measure(changed), t.limit) for t in troubles]
    rng = np.random.default_rng(0)
    size = len(base.moved)
    shares = _shares(pairs, np.arange(size))
    draws = np.stack([*(_shares(pairs, rng.integers(0, size, size)) for _ in range(_RESAMPLES)), shares])
    shown = draws[~np.isnan(draws).all(1)]
    low, high = np.quantile(np.nanmean(shown, 1), [0.025, 0.975])
    lows = np.nanquantile(draws, 0.025, axis=0)
    removes = np.flatnonzero((shares >= _REMOVED) & (lows > 0)).tolist()
    return Remedy(change=change, share=float(shares.mean()), low=float(low), high=float(high), removes=tuple(removes))


def _shares(
    pairs: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], float]], picked: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """For each trouble how much of the excess over the limit is gone, 0 to 1; NaN where this sample of groups shows no such trouble."""
    shares = []
    for before, after, limit in pairs:
        was, now = (float(x.mean() if len(x) == 1 else x[picked].mean()) for x in (before, after))
        shares.append(float(np.clip((was - now) / max(was - limit, 1e-12), 0, 1)) if was > limit else float("nan"))
    return np.array(shares)


def _interval(values: np.ndarray[Any, Any]) -> tuple[float, float]:
    picks = np.random.default_rng(0).integers(0, len(values), (_RESAMPLES, len(values)))
    low, high = np.quantile(values[picks].mean(1), [0.025, 0.975])
    return float(low), float(high)


def is_named(remedy: Remedy) -> bool:
    """True if a change removes most of a trouble, and not by chance."""
    return bool(remedy.removes)
