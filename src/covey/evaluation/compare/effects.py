"""Difference between B and A with its confidence interval: paired by question, and over seeds where there are several.

A score varies with the seed of the run and with the questions that happen to be in the test set. With several seeds both count,
so that the verdict holds for new seeds and new questions of the same kind. Each run gives one score a question; the variance of
the mean difference is that over seeds, plus that over questions, less what both hold twice (crossed random effects, as in the
two-way clustering of Cameron, Gelbach and Miller 2011), with Satterthwaite's degrees of freedom (1946). The part of the seeds is
taken to be no smaller than what chance within a run explains, which keeps two lucky seeds from looking certain.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from covey.evaluation.intervals import (
    Z95,
    Estimate,
    bounded_mean,
    mean_of_few,
    mean_of_seeds,
    paired_difference,
    quantile,
    two_sided,
)

Basis = Literal["seeds and questions", "questions", "seeds", "nothing"]


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Input of the test from one run: its seed, its mean score, and the score of every question where that is known."""

    seed: int | None
    mean: float
    questions: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The difference mean(B) - mean(A)."""

    value: float
    low: float
    high: float
    p_value: float
    """Probability of a difference at least this large if both were equally good. 1 where no test is possible."""
    basis: Basis
    """Source of variation that the test takes into account."""
    seeds: tuple[int, int]
    """Runs of A and of B."""
    questions: int
    """Questions that every run answered; 0: scores of single questions are not known."""
    is_paired: bool
    """True if runs were paired by seed."""
    detectable: float
    """The difference that would be found 4 times in 5 with as many seeds and questions."""

    @property
    def is_real(self) -> bool:
        """True if the difference is significant at the 5% level, by the test and by the interval."""
        return self.p_value < 0.05 and not self.low <= 0 <= self.high


def effect_of(a: Sequence[Scored], b: Sequence[Scored]) -> Effect:
    """Compare the runs of A with those of B. Raises ValueError when a side has no run."""
    if not a or not b:
        raise ValueError("a comparison needs at least one run on each side.")
    a, b, is_paired = _match(a, b)
    shared = shared_questions([*a, *b])
    seeds = (len(a), len(b))
    if len(shared) < 2:
        return _over_seeds(a, b, is_paired)
    grid_a, grid_b = _grid(a, shared), _grid(b, shared)  # [ka, Q], [kb, Q]
    if seeds == (1, 1):
        return _over_questions(grid_a, grid_b)
    variance, freedom = _paired_variance(grid_b - grid_a) if is_paired else _unpaired_variance(grid_a, grid_b)
    value, error = float(grid_b.mean() - grid_a.mean()), math.sqrt(variance)
    is_flat = _is_rounding(error, grid_a, grid_b)  # then seeds tell no more than one of them
    tested = _over_questions(grid_a, grid_b) if is_flat else _by_t(value, error, freedom)
    return replace(tested, basis="seeds and questions", seeds=seeds, questions=len(shared), is_paired=is_paired)


def _over_questions(grid_a: np.ndarray, grid_b: np.ndarray) -> Effect:
    """Test over questions alone, of the means over runs [k, Q]."""
    difference = paired_difference(grid_a.mean(0).tolist(), grid_b.mean(0).tolist())
    reach = max(difference.high - difference.value, difference.value - difference.low)  # shares end at 1
    freedom = difference.count - 1
    spread = reach * quantile(0.975, freedom) / Z95
    return Effect(
        value=difference.value, low=difference.value - spread, high=difference.value + spread, p_value=difference.p_value,
        basis="questions", seeds=(len(grid_a), len(grid_b)), questions=difference.count, is_paired=False,
        detectable=_detectable(spread / quantile(0.975, freedom), freedom),
    )  # fmt: skip


def adjusted(effects: Sequence[Effect]) -> list[Effect]:
    """The same effects with Holm's p-values (1979), where several sides are compared with the same A. Intervals are unchanged."""
    order = sorted(range(len(effects)), key=lambda i: effects[i].p_value)
    worst, out = 0.0, list(effects)
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(effects) - rank) * effects[i].p_value))
        out[i] = replace(effects[i], p_value=worst)
    return out


def _match(a: Sequence[Scored], b: Sequence[Scored]) -> tuple[list[Scored], list[Scored], bool]:
    """Runs of both sides in the order of their seeds where the seeds are the same, and whether they are."""
    by_seed_a = {run.seed: run for run in a}
    by_seed_b = {run.seed: run for run in b}
    is_paired = len(a) > 1 and None not in by_seed_a and set(by_seed_a) == set(by_seed_b)
    is_paired = is_paired and len(by_seed_a) == len(a) and len(by_seed_b) == len(b)
    if not is_paired:
        return list(a), list(b), False
    order = sorted(by_seed_a, key=str)
    return [by_seed_a[seed] for seed in order], [by_seed_b[seed] for seed in order], True


def shared_questions(runs: Sequence[Scored]) -> list[str]:
    """Questions that every run answered and had scored, in the order of the first; none if a run has no such scores."""
    shared: list[str] | None = None
    for run in runs:
        scored = {key for key, value in (run.questions or {}).items() if not math.isnan(value)}
        shared = [key for key in (shared if shared is not None else run.questions or {}) if key in scored]
    return shared or []


def _grid(runs: Sequence[Scored], questions: Sequence[str]) -> np.ndarray:
    return np.asarray([[(run.questions or {})[key] for key in questions] for run in runs], dtype=np.float64)


def _components(grid: np.ndarray) -> tuple[float, float, float]:
    """Variances of the grand mean of [k, Q] due to seeds, to questions, and to both at once (k > 1, Q > 1)."""
    k, size = grid.shape
    rows, columns = grid.mean(1), grid.mean(0)
    rest = grid - rows[:, None] - columns[None] + grid.mean()
    both = float((rest**2).sum()) / ((k - 1) * (size - 1)) / (k * size)
    return float(rows.var(ddof=1)) / k, float(columns.var(ddof=1)) / size, both


def _paired_variance(gaps: np.ndarray) -> tuple[float, float]:
    """Variance of the mean of paired differences [k, Q], and its degrees of freedom."""
    seeds, questions, both = _components(gaps)
    return _combine_variances(max(seeds, both), gaps.shape[0] - 1, questions, gaps.shape[1] - 1, both)


def _unpaired_variance(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """The same for runs that are not paired. A side with one run is taken to vary as the other does."""
    questions = float((b.mean(0) - a.mean(0)).var(ddof=1)) / a.shape[1]
    sides = []
    for runs, other in ((a, b), (b, a)):
        measured = runs if len(runs) > 1 else other
        seeds, _, both = _components(measured)
        scale = len(measured) / len(runs)
        sides.append((max(seeds, both) * scale, both * scale, len(measured) - 1))
    (seeds_a, both_a, freedom_a), (seeds_b, both_b, freedom_b) = sides
    seeds = seeds_a + seeds_b
    if 1 in (len(a), len(b)):
        freedom = float(freedom_a)
    else:
        freedom = _satterthwaite([(seeds_a, freedom_a), (seeds_b, freedom_b)])
    return _combine_variances(seeds, freedom, questions, a.shape[1] - 1, both_a + both_b)


def _combine_variances(
    seeds: float, seed_freedom: float, questions: float, freedom: float, both: float
) -> tuple[float, float]:
    total = max(seeds + questions - both, seeds, questions)
    return total, _satterthwaite([(seeds, seed_freedom), (questions, freedom)], total)


def _satterthwaite(parts: Sequence[tuple[float, float]], total: float | None = None) -> float:
    total = sum(variance for variance, _ in parts) if total is None else total
    below = sum(variance**2 / freedom for variance, freedom in parts)
    return total**2 / below if below > 0 else float(sum(freedom for _, freedom in parts))


def _over_seeds(a: Sequence[Scored], b: Sequence[Scored], is_paired: bool) -> Effect:
    """Test over seeds alone, without scores of single questions; with one seed a side no test is possible."""
    x, y = np.asarray([run.mean for run in a]), np.asarray([run.mean for run in b])
    x, y = (x, y) if is_paired else (x[~np.isnan(x)], y[~np.isnan(y)])
    value = float(y.mean() - x.mean()) if x.size and y.size else math.nan
    seeds = (len(x), len(y))
    if max(seeds) < 2 or min(seeds) < 1:
        return replace(_by_t(value, math.inf, 1), basis="nothing", seeds=seeds)
    if is_paired:
        error, freedom = float((y - x).std(ddof=1)) / math.sqrt(len(x)), float(len(x) - 1)
    else:
        many = [side if side.size > 1 else other for side, other in ((x, y), (y, x))]
        parts = [(float(m.var(ddof=1)) / s.size, m.size - 1) for m, s in zip(many, (x, y), strict=True)]
        freedom = float(max(seeds) - 1) if min(seeds) == 1 else _satterthwaite(parts)
        error = math.sqrt(sum(variance for variance, _ in parts))
    if _is_rounding(error, x, y):
        ways = 2 ** len(x) if is_paired else math.comb(x.size + y.size, x.size)
        tested = _without_spread(0.0 if _is_rounding(abs(value), x, y) else value, min(1.0, 2 / ways))
    else:
        tested = _by_t(value, error, freedom)
    return replace(tested, basis="seeds", seeds=seeds, is_paired=is_paired)


def _is_rounding(size: float, a: np.ndarray, b: np.ndarray) -> bool:
    """True if `size` is no more than the rounding of the scores it was computed of."""
    return bool(size <= 1e-12 * max(np.abs(a).max(), np.abs(b).max()))


def _without_spread(value: float, smallest: float) -> Effect:
    """The test by permutations, of runs that measured no spread. `smallest`: its p where no order is more extreme.

    From 0.05 on, as with a few seeds, no interval can be computed; below, all differences between seeds are the interval of ranks.
    """
    reach = 0.0 if smallest < 0.05 else math.inf
    p_value = smallest if value else 1.0
    return replace(_by_t(value, math.inf, 1), low=value - reach, high=value + reach, p_value=p_value, detectable=reach)


def _by_t(value: float, error: float, freedom: float) -> Effect:
    blank = {"basis": "nothing", "seeds": (0, 0), "questions": 0, "is_paired": False}
    if math.isinf(error) or math.isnan(value):
        return Effect(value=value, low=-math.inf, high=math.inf, p_value=1.0, detectable=math.inf, **blank)  # type: ignore[arg-type]
    spread = quantile(0.975, freedom) * error
    p_value = two_sided(value / error, freedom)
    return Effect(
        value=value, low=value - spread, high=value + spread, p_value=p_value, detectable=_detectable(error, freedom), **blank  # type: ignore[arg-type]
    )  # fmt: skip


def _detectable(error: float, freedom: float) -> float:
    """Difference found with 80% power at the 5% level."""
    return error * (quantile(0.975, freedom) + quantile(0.8, freedom))


def mean_of(runs: Sequence[Scored]) -> Estimate:
    """The mean score of one side with its 95% interval, for new questions and (with several runs) new seeds.

    Over the questions that every run answered; over the runs alone where those are not known.
    """
    shared = shared_questions(runs)
    if len(shared) < 2:
        return mean_of_seeds([run.mean for run in runs])
    grid = _grid(runs, shared)  # [k, Q]
    if grid.min() == grid.max() and grid.min() in (0.0, 1.0):  # all right or all wrong: no spread was measured
        return bounded_mean(grid.mean(0).tolist())
    if len(runs) == 1:
        return mean_of_few(grid[0].tolist())
    variance, freedom = _paired_variance(grid)
    value, spread = float(grid.mean()), quantile(0.975, freedom) * math.sqrt(variance)
    return Estimate(value, value - spread, value + spread, len(shared))
