"""Metrics of scored groups, under TRL's names, with values by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from covey import algorithms as alg
from covey.errors import RewardError
from covey.rewards import Scorer, reward, reward_metrics
from covey.runs import evaluations
from covey.training.credit import completion_metrics, with_advantages
from covey.types import Mean, merge_metrics
from kit import completion, group

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


# -- which scores are right ----------------------------------------------------------------------------------------------------


def passed(*rewards, weights=(1.0,), scales=None):
    """`groups/all_pass` and `groups/all_fail` of groups, None where these do not exist."""
    groups = [group(["a"] * len(own), rewards=own) for own in rewards]
    found = reward_metrics(groups, [f"r{i}" for i in range(len(weights))], weights, scales)
    return tuple(found[name].value if name in found else None for name in ("groups/all_pass", "groups/all_fail"))


def test_right_and_wrong_exist_only_where_the_scale_is_known():
    assert passed([[-3.0], [-3.0]]) == (None, None), "a length penalty: 0 would be its best, not wrong"
    assert passed([[0.0], [0.7]]) == (None, None)
    assert passed([[0.0], [0.0]], [[1.0], [1.0]]) == (0.5, 0.5)
    assert passed([[0.0], [0.0]], [[0.7], [1.0]], scales=[(0.0, 1.0)]) == (0.0, 0.5)


def test_a_declared_scale_counts_from_its_own_ends():
    assert passed([[-1.0], [-1.0]], [[1.0], [1.0]], [[0.0], [0.0]], scales=[(-1.0, 1.0)]) == (1 / 3, 1 / 3)


def test_a_reward_of_unknown_scale_is_left_out_of_the_verdict_and_a_fine_of_known_scale_counts():
    assert passed([[1.0, -7.5], [1.0, -2.5]], weights=(1.0, 0.1)) == (1.0, 0.0)
    assert passed([[1.0, 1.0], [1.0, 0.0]], weights=(1.0, -0.5)) == (0.0, 0.0), "one of them was fined"
    assert passed([[0.0, 1.0], [0.0, 0.0]], weights=(1.0, -0.5)) == (0.0, 1.0)


def test_the_scorer_knows_declared_scales_and_forgets_what_it_saw_once_another_score_comes():
    @reward(scale=(-1, 1))
    def declared(completions):
        return [0.5 for _ in completions]

    scorer = Scorer.of([declared, "f1", lambda completions: []])
    assert scorer.scales == [(-1.0, 1.0), (0.0, 1.0), None]
    scorer.observe([group(["a"], rewards=[[0.5, 0.2, 1.0]])])
    assert scorer.scales == [(-1.0, 1.0), (0.0, 1.0), (0.0, 1.0)]
    again = Scorer.of([declared, "f1", lambda completions: []])
    again.load_state_dict(scorer.state_dict())
    assert again.scales == scorer.scales
    scorer.observe([group(["a"], rewards=[[0.5, 0.2, 0.5]])])
    assert scorer.scales[2] is None
    scorer.observe([group(["a"], rewards=[[0.5, 0.2, 1.0]])])
    assert scorer.scales[2] is None


@pytest.mark.parametrize("scale", [(1, 0), (0, math.inf), (0,), (math.nan, 1)])
def test_what_is_no_scale_is_refused(scale):
    with pytest.raises(RewardError, match="is no scale"):
        reward(scale=scale)


def test_lengths_are_those_of_completions_that_came():
    came = [completion(ids=[1, 2, 3]), completion(ids=[1], finish="length")]
    lost = replace(group([]), completions=(completion("", finish="error"),))
    measured = lambda groups: {name: metric.value for name, metric in completion_metrics(groups).items()}
    both = replace(group([]), completions=tuple(came))
    assert measured([both, lost]) == measured([both])
    assert measured([both])["completions/min_length"] == 1.0
    assert all(math.isnan(value) for value in measured([lost]).values())


def test_a_judge_that_is_out_for_a_group_lowers_no_mean():
    def judge(completions, prompts):
        if "out" in prompts:
            raise ConnectionError("judge is down")
        return [1.0] * len(completions)

    def style(completions):
        return [None if text == "none" else 0.5 for text in completions]

    scorer = Scorer([judge, style])
    scored = scorer.score([group(["a", "none"], uid="0:0"), group(["b", "c"], uid="0:1", question="out")])
    metrics = reward_metrics(scored, ["judge", "style"], [1.0, 1.0])
    assert metrics["reward"].value == 1.25  # 1.5, and 1 of an abstention; the sums without the judge would be 0.5
    assert metrics["rewards/style/mean"].count == 3
    assert metrics["rewards/unscored"].value == 0.0
    assert [total for each in scored for total in with_advantages([each], alg.grpo(), scorer.weights)[0].totals] == [
        1.5,
        1,
        0.5,
        0.5,
    ]
    rows = evaluations.rows_of(scored, ["judge", "style"], [1.0, 1.0])
    assert [row["reward"] for row in rows] == [1.5, 1.0, None, None]


def test_an_abstention_is_no_failure_where_another_completion_failed():
    """Rewards of several tasks: `code` says nothing of a prompt of mathematics, of which one completion was not sampled."""
    scorer = Scorer([maths, code])
    drawn = group(["a", "b", "c", "d"])
    drawn = replace(drawn, completions=(*drawn.completions[:3], replace(drawn.completions[3], finish="error")))
    scored = scorer.score([drawn])
    assert reward_metrics(scored, scorer.names, scorer.weights)["reward"] == Mean(3.0, 3.0)
    assert [row["reward"] for row in evaluations.rows_of(scored, scorer.names, [1.0, 1.0])] == [1.0, 1.0, 1.0, None]


def maths(completions):
    return [1.0] * len(completions)


def code(completions):
    return [None] * len(completions)
