"""Intervals of shares: within their scale, and right as often as they say."""

from __future__ import annotations

from types import SimpleNamespace

import numpy
import pytest
import torch

from covey.evaluation.assessment import Assessment, totals
from covey.evaluation.compare.results import Score
from covey.evaluation.figures.gather import interval_at
from covey.evaluation.intervals import bounded_mean, mean_of_seeds, mean_reward, paired_difference, pass_at_k
from covey.evaluation.model_card import _estimated
from covey.experiments.several import summary
from covey.monitor.view.reading import HeldOut
from covey.runs import evaluations
from kit import group


@pytest.mark.parametrize("right, prompts", [(0, 20), (20, 20), (19, 20), (1, 200)])
def test_the_interval_of_a_share_stays_within_0_and_1(right, prompts):
    found = bounded_mean([1.0] * right + [0.0] * (prompts - right))
    assert 0.0 <= found.low <= found.value <= found.high <= 1.0
    assert found.high > found.low


def test_pairs_without_any_spread_have_bonett_and_prices_interval():
    gained, alike = paired_difference([0.0] * 8, [1.0] * 8), paired_difference([1.0] * 20, [1.0] * 20)
    assert (gained.value, gained.low, gained.high) == (
        1.0,
        pytest.approx(0.8 - 1.96 * 0.06**0.5 * 0.6**0.5, abs=1e-4),
        1.0,
    )
    assert (alike.value, alike.high) == (0.0, pytest.approx(1.96 * (2 / 22 / 22) ** 0.5, abs=1e-4))
    assert alike.low == -alike.high


def test_pairs_of_other_scores_without_any_spread_prove_no_more_than_shares_do():
    """A gain and a loss of the range of all scores are added: rewards of 0 and 10 have ten times the interval of 0 and 1."""
    gained, shares = paired_difference([0.0] * 8, [10.0] * 8), paired_difference([0.0] * 8, [1.0] * 8)
    assert gained.low == pytest.approx(10 * shares.low)
    assert gained.high > gained.value == 10.0
    rounded = paired_difference([0.1, 0.2, 0.3], [0.2, 0.3, 0.4])  # 0.4 - 0.3 and 0.2 - 0.1 differ in the last bit
    assert rounded.high - rounded.low > 0.1
    same = paired_difference([0.25, 0.5], [0.25, 0.5])
    assert -same.low == same.high == pytest.approx(1.96 * 0.25 * (2 / 4 / 4) ** 0.5, abs=1e-4)


def test_answers_that_no_reward_scored_count_in_no_pass_at_k():
    nan = float("nan")
    sampled = ((1.0, nan, 0.0, 1.0), (nan,) * 4, (0.0, nan, nan, nan))
    found = Assessment(greedy=(1.0, nan, 0.0), sampled=sampled, texts=("",) * 3, mean_length=1.0, threshold=0.5)
    assert (found.pass_at(1).value, found.pass_at(1).count) == (pytest.approx((2 / 3 + 0) / 2), 2)
    assert (found.pass_at(2).value, found.pass_at(2).count) == (1.0, 1)


@pytest.mark.parametrize("threshold", [0.1 * n for n in range(1, 31)])
def test_an_answer_whose_reward_is_the_threshold_is_right(threshold):
    """Rewards are float32, in which 0.9 lies below 0.9."""
    weighted = SimpleNamespace(weights=torch.tensor([1.0, 0.1]))
    scores = totals(group(["a", "b"], rewards=[[threshold, 0.0], [threshold - 0.1, 0.99]]), weighted)
    found = Assessment(greedy=scores, sampled=(scores,), texts=("",) * 2, mean_length=1.0, threshold=threshold)
    assert (found.right(), found.accuracy.value, found.pass_at(1).value) == ([1.0, 0.0], 0.5, 0.5)
    assert [Score(threshold=threshold)._of(score) for score in scores] == [1.0, 0.0]


@pytest.mark.parametrize("threshold", [1e-9, 1e-6])
def test_an_answer_without_a_reward_misses_a_threshold_just_above_none(threshold):
    assessed = Assessment(
        greedy=(0.0, 0.01), sampled=((0.0,), (0.01,)), texts=("",) * 2, mean_length=1.0, threshold=threshold
    )
    assert assessed.right() == [0.0, 1.0]


def test_a_difference_of_shares_stays_within_one():
    found = paired_difference([0.0] * 19 + [1.0], [1.0] * 20)
    assert found.high <= 1.0


@pytest.mark.parametrize("a, b", [(1, 1), (5, 0.3), (0.3, 5), (0.05, 0.05), (50, 1)])
def test_the_interval_of_pass_at_k_holds_the_truth_about_as_often_as_it_says(a, b):
    draws, prompts, rng = 8, 50, numpy.random.default_rng(0)
    truth = (1 - (1 - rng.beta(a, b, 200_000)) ** 4).mean()
    hits = 0
    for _ in range(400):
        right = rng.binomial(draws, rng.beta(a, b, prompts))
        values = [pass_at_k(draws, int(count), 4) for count in right]
        found = bounded_mean(values)
        hits += found.low <= truth <= found.high
    assert hits >= 0.92 * 400


@pytest.mark.parametrize("rewards", [[1.0] * 8, [0.0, 0.25, 1.0], [2.0, -1.0, 3.0], [2.5] * 9])
def test_an_evaluation_has_one_interval_wherever_it_is_shown(tmp_path, rewards):
    groups = [group(["4"], uid=f"0:{i}", question=f"{i} =", rewards=[[reward]]) for i, reward in enumerate(rewards)]
    rows = evaluations.rows_of(groups, ["r"], [1.0])
    evaluations.write(tmp_path, 10, "eval", rows)
    shown = HeldOut(tmp_path).interval("eval_reward", 10)
    assert shown == interval_at(SimpleNamespace(answers=lambda name, step: rows), "eval", 10)
    estimate = mean_reward(rewards)
    assert shown == (estimate.low, estimate.high)
    assert f"({estimate.low:.4g} to {estimate.high:.4g})" in _estimated(evaluations.by_question(rows), 10)
    assert estimate.high > estimate.low or len(rewards) > 5, "a few equal rewards do not show that all are equal"


def test_a_few_equal_seeds_do_not_show_that_the_next_is_equal_too():
    results = {seed: {"metrics": {"eval_reward": 2.5}} for seed in range(3)}
    assert summary(results)["eval_reward"] == mean_of_seeds([2.5] * 3)
    assert numpy.isinf(mean_of_seeds([2.5] * 3).high)
    assert mean_of_seeds([1.0, 2.0, 3.0]).high == pytest.approx(4.48, abs=0.01)
