"""Whether B is better than A: by hand for small cases, and by simulation how often it is wrong and how often it finds out."""

import math

import numpy as np
import pytest

from covey.evaluation.compare.effects import Scored, adjusted, effect_of, mean_of
from covey.evaluation.intervals import mean_of_few, quantile, two_sided
from kit import rest_nightly


@pytest.mark.parametrize(
    "p, freedom, expected",  # from the tables of Student's t
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 4, 2.776), (0.975, 30, 2.042), (0.8, 5, 0.920), (0.995, 10, 3.169)],
)
def test_quantiles_are_those_of_the_tables(p, freedom, expected):
    assert quantile(p, freedom) == pytest.approx(expected, abs=5e-4)


def test_tails_are_exact_where_they_have_a_closed_form():
    for t in (0.1, 1.0, 3.0, 40.0):
        assert two_sided(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t), rel=1e-10)
        assert two_sided(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-8)
    assert two_sided(1.959964, 1e7) == pytest.approx(0.05, abs=1e-6)


def test_a_mean_of_few_has_students_interval():
    found = mean_of_few([1.0, 2.0, 3.0, float("nan")])
    assert (found.value, found.count) == (2.0, 3)
    assert found.high - found.value == pytest.approx(4.3027 / math.sqrt(3), abs=1e-3)
    assert mean_of_few([1.0]).high == math.inf


def runs(grid, seeds=None):
    """A run a row of scores [k, Q]."""
    seeds = range(len(grid)) if seeds is None else seeds
    return [
        Scored(seed=seed, mean=float(np.mean(row)), questions={f"q{i}": float(x) for i, x in enumerate(row)})
        for seed, row in zip(seeds, grid, strict=True)
    ]


def test_one_seed_each_is_paired_by_question():
    found = effect_of(runs([[0, 0, 0, 0, 1, 1]]), runs([[1, 1, 1, 1, 1, 1]]))
    assert found.basis == "questions"
    assert found.value == pytest.approx(4 / 6)
    assert found.p_value == pytest.approx(2 * 0.5**4), "McNemar's exact test: 4 gains, no loss"


def test_an_interval_is_as_wide_below_as_above_where_shares_end():
    found = effect_of(runs([[0] * 9 + [1]]), runs([[1] * 10]))  # 9 of 10 gained: deviation sqrt(0.1)
    assert found.value - found.low == pytest.approx(2.2622 * math.sqrt(0.1 / 10), abs=1e-4)


def test_answers_without_any_spread_are_not_certain():
    found = effect_of(runs([[0] * 8]), runs([[1] * 8]))
    assert found.low < 0.5, "Bonett and Price's interval ends at 0.43"
    assert found.is_real
    alone = mean_of(runs([[1] * 20]))
    assert (alone.value, round(alone.low, 3), alone.high) == (1.0, 0.839, 1.0)


def test_seed_means_alone_are_the_paired_t_test():
    a = [Scored(seed=s, mean=m) for s, m in enumerate([0.50, 0.52, 0.48])]
    b = [Scored(seed=s, mean=m) for s, m in enumerate([0.55, 0.56, 0.54])]
    found = effect_of(a, list(reversed(b)))
    gaps = np.array([0.05, 0.04, 0.06])
    assert (found.is_paired, found.basis, found.seeds) == (True, "seeds", (3, 3))
    t = gaps.mean() / (gaps.std(ddof=1) / math.sqrt(3))
    assert found.p_value == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert found.high - found.value == pytest.approx(4.3027 * 0.01 / math.sqrt(3), abs=1e-5)


def of_means(*means, first=0):
    return [Scored(seed=first + i, mean=mean) for i, mean in enumerate(means)]


@pytest.mark.parametrize("a, b", [((0.5, 0.4), (0.7, 0.6)), ((0.5, 0.25), (0.75, 0.5)), ((0.1,), (0.3, 0.3))])
@pytest.mark.parametrize("first", [0, 9])
def test_a_few_seeds_with_equal_gaps_prove_nothing(a, b, first):
    found = effect_of(of_means(*a), of_means(*b, first=first))
    assert not found.is_real
    assert found.p_value >= 0.1
    assert found.high - found.low > 0.1


def test_seeds_without_any_spread_are_tested_by_their_orders():
    few, many = (effect_of(of_means(*[0.25] * k), of_means(*[0.75] * k)) for k in (5, 6))
    assert (few.p_value, few.low, few.high, few.detectable) == (2 / 32, -math.inf, math.inf, math.inf)
    assert (many.p_value, many.low, many.high, many.is_real) == (2 / 64, 0.5, 0.5, True)
    apart = effect_of(of_means(*[0.25] * 4), of_means(*[0.75] * 4, first=9))
    assert apart.p_value == pytest.approx(2 / 70)
    same = effect_of(of_means(0.1, 0.1), of_means(0.1, 0.1))
    assert (same.value, same.p_value, same.is_real) == (0.0, 1.0, False)
    assert mean_of(of_means(0.1, 0.1)).high == math.inf


def test_seeds_without_any_spread_leave_that_of_the_questions():
    found = effect_of(runs([[0] * 8, [0] * 8]), runs([[1] * 8, [1] * 8]))
    assert (found.basis, found.seeds, found.questions) == ("seeds and questions", (2, 2), 8)
    assert (found.p_value, found.low < 0.5) == (2 / 2**8, True)
    same = effect_of(runs([[0, 1, 1], [0, 1, 1]]), runs([[0, 1, 1], [0, 1, 1]]))
    assert (same.p_value, same.low < -0.5, same.high > 0.5) == (1.0, True, True)


def test_other_seeds_are_welchs_test():
    a = [Scored(seed=s, mean=m) for s, m in enumerate([0.1, 0.2, 0.3])]
    b = [Scored(seed=9 + s, mean=m) for s, m in enumerate([0.4, 0.5])]
    found = effect_of(a, b)
    assert not found.is_paired
    error = math.sqrt(0.01 / 3 + 0.005 / 2)
    freedom = error**4 / ((0.01 / 3) ** 2 / 2 + (0.005 / 2) ** 2)
    assert found.p_value == pytest.approx(two_sided(0.25 / error, freedom))


def test_one_mean_each_tells_nothing():
    found = effect_of([Scored(seed=0, mean=0.1)], [Scored(seed=0, mean=0.9)])
    assert (found.basis, found.p_value, found.is_real) == ("nothing", 1.0, False)
    assert found.value == pytest.approx(0.8)


def test_the_same_answers_are_no_difference():
    grid = np.random.default_rng(0).integers(0, 2, (3, 20))
    found = effect_of(runs(grid), runs(grid))
    assert (found.value, found.p_value, found.is_real) == (0.0, 1.0, False)


def test_only_questions_that_all_runs_answered_count():
    a = runs([[0, 1, 0, 1]])
    b = [Scored(seed=0, mean=1.0, questions={"q0": 1.0, "q1": 1.0, "q2": math.nan, "other": 0.0})]
    assert effect_of(a, b).questions == 2


def test_several_comparisons_with_the_same_run_pay_for_it():
    one = effect_of(runs([[0, 0, 0, 0, 0, 0]]), runs([[1, 1, 1, 1, 1, 1]]))
    assert one.p_value == pytest.approx(2 / 64)
    both = adjusted([one, one])
    assert [round(effect.p_value, 4) for effect in both] == [0.0625, 0.0625]
    assert not any(effect.is_real for effect in both)


def side(rng, base, k, seed_spread, gain=0.0, answers=4):
    """[k, Q]: methods differ by question, runs by seed, answers by chance."""
    method = rng.normal(0, 0.1, len(base))
    rows = []
    for _ in range(k):
        share = np.clip(base + gain + method + rng.normal(0, seed_spread) + rng.normal(0, 0.1, len(base)), 0, 1)
        rows.append(rng.binomial(answers, share) / answers)
    return np.array(rows)


def rate(k, seed_spread, gain, *, paired=True, times=400, size=100):
    """Share of simulated comparisons that call a difference real."""
    rng = np.random.default_rng(17)
    hits = 0
    for _ in range(times):
        base = rng.beta(0.7, 0.7, size)
        a, b = side(rng, base, k, seed_spread), side(rng, base, k, seed_spread, gain)
        hits += effect_of(runs(a), runs(b, None if paired else range(50, 50 + k))).is_real
    return hits / times


@pytest.mark.slow
@pytest.mark.parametrize(
    "k, seed_spread",
    rest_nightly([(3, 0.05), (3, 0.0), (5, 0.1), (1, 0.0), (2, 0.05), (5, 0.02)], 1),
)
def test_equally_good_methods_are_told_apart_in_about_5_of_100_comparisons(k, seed_spread):
    times = 400 if k > 1 else 200  # 20,000 sign flips each
    assert rate(k, seed_spread, 0.0, times=times) <= 0.075  # 0.05 and two standard errors


@pytest.mark.nightly
def test_runs_of_other_seeds_are_no_more_often_wrong():
    assert rate(3, 0.05, 0.0, paired=False) <= 0.075


@pytest.mark.nightly
def test_several_seeds_are_not_needlessly_timid():
    assert rate(5, 0.05, 0.0) >= 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    "k, seed_spread, gain",
    rest_nightly([(3, 0.02, 0.15), (1, 0.0, 0.15), (5, 0.03, 0.12)], 1),
)
def test_a_true_difference_is_found(k, seed_spread, gain):
    assert rate(k, seed_spread, gain, times=150) >= 0.8


@pytest.mark.nightly
def test_a_difference_of_the_detectable_size_is_found_about_4_times_in_5():
    rng = np.random.default_rng(5)
    base = rng.beta(0.7, 0.7, 100)
    expected = np.median(
        [effect_of(runs(side(rng, base, 5, 0.05)), runs(side(rng, base, 5, 0.05))).detectable for _ in range(50)]
    )
    assert 0.65 <= rate(5, 0.05, 1.15 * float(expected), times=150) <= 0.98  # clipped shares lose some of the gain
