"""Intervals and tests against published or hand-counted numbers."""

import doctest
import math

import numpy as np
import pytest

from covey.evaluation import intervals
from covey.evaluation.intervals import mean, paired_difference, pass_at_k, proportion


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(intervals).failed == 0


def test_wilsons_interval_stays_inside_at_both_ends():
    assert proportion(0, 10).low == 0.0
    assert proportion(0, 10).high == pytest.approx(0.2775, abs=1e-4)
    assert proportion(10, 10).high == pytest.approx(1.0)


def test_wilsons_interval_covers_the_truth_about_95_times_in_100():
    draws = np.random.default_rng(1).binomial(300, 0.4, size=4000)
    covered = [e.low <= 0.4 <= e.high for e in (proportion(int(c), 300) for c in draws)]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)


def test_pass_at_k_equals_counting_every_subset():
    from itertools import combinations

    n, right = 7, 3
    for k in range(1, n + 1):
        subsets = list(combinations(range(n), k))
        want = sum(any(i < right for i in subset) for subset in subsets) / len(subsets)
        assert pass_at_k(n, right, k) == pytest.approx(want)


def test_pass_at_k_refuses_more_than_was_drawn():
    with pytest.raises(ValueError, match="needs at least 9 samples"):
        pass_at_k(8, 1, 9)


def test_mcnemar_by_hand():
    before, after = [0] * 9 + [1] + [1] * 10, [1] * 9 + [0] + [1] * 10
    difference = paired_difference(before, after)
    assert difference.value == pytest.approx(8 / 20)
    assert difference.p_value == pytest.approx(2 * (1 + 10) / 2**10)
    assert difference.is_real


def test_two_equal_models_differ_about_5_times_in_100():
    rng = np.random.default_rng(0)
    alarms = [
        paired_difference(rng.normal(size=40).tolist(), rng.normal(size=40).tolist(), draws=400, seed=i).is_real
        for i in range(300)
    ]
    assert np.mean(alarms) == pytest.approx(0.05, abs=0.035)


def test_prompts_without_a_score_are_left_out_of_both_sides():
    assert paired_difference([0, 1, math.nan], [1, 1, 1]).count == 2
    assert mean([1.0, math.nan, 3.0]).value == 2.0


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e9])
def test_the_scale_of_scores_decides_no_sign_flip(scale: float):
    rng = np.random.default_rng(3)
    for _ in range(20):
        gaps = scale * rng.uniform(0.5, 1.5, 5)  # all of one sign: 2 of 32 flips are as extreme
        assert paired_difference([0.0] * 5, gaps.tolist()).p_value == pytest.approx(2 / 32, rel=0.1)
