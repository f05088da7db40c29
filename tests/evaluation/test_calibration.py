"""Area under the ROC curve and calibration against hand calculations, DeLong's variance, and how often the interval holds."""

import math

import numpy as np
import pytest

from covey.evaluation.calibration import auc, calibration
from covey.evaluation.intervals import Z95


def test_ties_count_half():
    found = auc([0.9, 0.5, 0.5, 0.1], [True, True, False, False], range(4))
    assert found.value == (1 + 1 + 0.5 + 1) / 4
    assert math.isnan(auc([0.5, 0.2], [True, True], range(2)).value)


def test_cases_that_stand_alone_have_delongs_variance():
    """DeLong et al. 1988; Wilson's interval solves (value - bound)^2 = z^2 bound (1 - bound) / trials."""
    rng = np.random.default_rng(0)
    scores = rng.random(60).round(1)
    labels = rng.random(60) < scores
    right, wrong = scores[labels][:, None], scores[~labels][None]
    wins = (right > wrong) + 0.5 * (right == wrong)
    variance = wins.mean(1).var(ddof=1) / len(right) + wins.mean(0).var(ddof=1) / wrong.shape[1]
    found = auc(scores.tolist(), labels.tolist(), range(60))
    value = wins.mean()
    assert found.value == pytest.approx(value)
    trials = value * (1 - value) / variance
    for bound in (found.low, found.high):
        assert (value - bound) ** 2 == pytest.approx(Z95**2 * bound * (1 - bound) / trials)


def test_the_interval_holds_the_truth_about_95_times_in_100_where_steps_of_a_completion_are_alike():
    rng = np.random.default_rng(1)

    def draw(completions):
        common = rng.normal(size=(completions, 1))
        labels = common + rng.normal(size=(completions, 4)) > 0
        scores = 0.7 * common + 0.8 * labels + rng.normal(size=(completions, 4))
        return scores.ravel(), labels.ravel(), np.repeat(np.arange(completions), 4)

    true = auc(*draw(50_000)).value
    held = {"clusters": 0, "alone": 0}
    for _ in range(400):
        scores, labels, completions = draw(30)
        for name, clusters in (("clusters", completions), ("alone", range(120))):
            found = auc(scores, labels, clusters)
            held[name] += found.low <= true <= found.high
    assert 0.92 < held["clusters"] / 400 < 0.98
    assert held["alone"] < held["clusters"]


def test_nothing_that_varied_leaves_an_interval_still():
    found = auc([0.9, 0.8, 0.2, 0.1], [True, True, False, False], [0, 1, 0, 1])
    assert (found.value, found.high) == (1.0, 1.0)
    assert found.low < 0.5  # two completions show little


def test_calibration_is_the_mean_distance_of_predicted_and_observed_shares():
    """Twenty cases in ten bins of two: all say 0.8, and of each bin one came true."""
    found = calibration([0.8] * 20, [True, False] * 10, range(20))
    assert found.error == pytest.approx(0.3)
    assert found.brier == pytest.approx((0.04 + 0.64) / 2)
    assert [(one.count, one.observed) for one in found.bins] == [(2, 0.5)] * 10
