"""Metrics of scored groups, under TRL's names, with values by hand."""

from __future__ import annotations

import math

import pytest

from covey.rewards import reward_metrics
from covey.types import Mean, merge_metrics
from kit import group

NAN = math.nan


def batch():
    return [
        group(["a", "b"], rewards=[[1.0, 2.0], [0.0, NAN]]),  # totals 2, 0
        group(["c", "d"], rewards=[[1.0, 2.0], [1.0, 2.0]]),  # 2, 2: full marks
        group(["e", "f"], rewards=[[0.0, 0.0], [NAN, NAN]]),  # 0, nobody scored it: alone, so not tied
    ]


def test_means_and_deviations_are_over_what_was_scored():
    metrics = {name: metric.value for name, metric in reward_metrics(batch(), ["x", "y"], [1.0, 0.5]).items()}
    assert metrics["rewards/x/mean"] == pytest.approx(3 / 5)
    assert metrics["rewards/x/std"] == pytest.approx(math.sqrt(0.3))  # 1 0 1 1 0: squares 1.2 over 4
    assert metrics["rewards/y/mean"] == pytest.approx(6 / 4)
    assert metrics["reward"] == pytest.approx(6 / 5)
    assert metrics["reward_std"] == pytest.approx(math.sqrt(1.2))  # 2 0 2 2 0
    assert metrics["rewards/unscored"] == pytest.approx(1 / 6)


def test_tied_passed_and_failed_groups_are_counted():
    metrics = reward_metrics(batch(), ["x", "y"], [1.0, 0.5])
    assert metrics["frac_reward_zero_std"] == Mean(1, 3)
    assert metrics["groups/all_pass"] == Mean(1, 3)
    assert metrics["groups/all_fail"] == Mean(1, 3)


def test_parts_of_a_batch_merge_to_the_whole():
    whole = reward_metrics(batch(), ["x", "y"], [1.0, 0.5])
    parts = merge_metrics(reward_metrics([one], ["x", "y"], [1.0, 0.5]) for one in batch())
    assert {name: metric.value for name, metric in parts.items()} == pytest.approx(
        {name: metric.value for name, metric in whole.items()}
    )


def test_nothing_scored_is_nan_and_no_group_is_no_metric():
    metrics = reward_metrics([group(["a"], rewards=[[NAN]])], ["x"], [1.0])
    assert math.isnan(metrics["reward"].value)
    assert metrics["frac_reward_zero_std"].value == 0.0
    assert reward_metrics([], ["x"], [1.0]) == {}


def test_groups_that_were_not_scored_are_refused():
    with pytest.raises(ValueError, match="needs scored groups"):
        reward_metrics([group(["a"])], ["x"], [1.0])
