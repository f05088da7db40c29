"""From several rewards to one, with values by hand: schedules, scales, bounds, and each reward's share."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from covey.algorithms import from_name
from covey.errors import ConfigError
from covey.rewards import Combiner, Scorer, advantage_shares
from covey.rewards.combining import Schedule, weight_of
from covey.training.credit import with_advantages
from covey.types import Spread
from kit import group

NAN = math.nan


def rewards_of(groups):
    return [[[round(v, 3) for v in row] for row in g.rewards.nan_to_num(99).tolist()] for g in groups]


@pytest.mark.parametrize(
    "given, at",
    [
        (0.5, {0: 0.5, 100: 0.5}),
        ("2", {0: 2.0}),
        ("linear:1:0:200", {0: 1.0, 50: 0.75, 200: 0.0, 999: 0.0}),
        ("cosine:0:1:100", {0: 0.0, 50: 0.5, 100: 1.0}),
        ("step:0:3:10", {9: 0.0, 10: 3.0}),
        (lambda step: step / 4, {2: 0.5}),
    ],
)
def test_a_weight_is_a_number_a_schedule_or_a_function_of_the_step(given, at):
    weight = weight_of(given)
    assert {step: pytest.approx(weight(step)) for step in at} == at


@pytest.mark.parametrize(
    "given", ["linear:1:0", "cubic:1:0:5", "linear:1:0:0", "much", math.nan, None, "linear:inf:0:5"]
)
def test_a_weight_that_cannot_be_read_is_refused_by_name(given):
    with pytest.raises(ConfigError, match=r"reward_weights|finite"):
        weight_of(given)


def test_the_scorer_weighs_by_the_step_that_training_has_reached_and_logs_what_moves():
    state = SimpleNamespace(global_step=0)
    one = lambda completions: [1.0 for _ in completions]
    other, third = lambda completions: one(completions), lambda completions: one(completions)
    other.__name__, third.__name__ = "other", "third"
    options = ["linear:1:0:4", 2, lambda step: 5.0 - step]
    scorer = Scorer([one, other, third], options, trainer_state=lambda: state)
    assert scorer.weights.tolist() == [1.0, 2.0, 5.0]
    state.global_step = 3
    assert scorer.weights.tolist() == [0.25, 2.0, 2.0]
    scorer.score([group(["a"])])
    logged = {name: metric.value for name, metric in scorer.take_metrics().items() if name.endswith("/weight")}
    assert logged == {"rewards/<lambda>/weight": 0.25, "rewards/third/weight": 2.0}


def test_by_group_each_reward_is_standard_within_its_own_group():
    groups = [
        group("ab", rewards=[[0.0, 10.0], [2.0, 10.0]]),
        group("cde", rewards=[[0.0, 1.0], [NAN, 2.0], [4.0, 3.0]]),
    ]
    scaled = Combiner("group", num_rewards=2)(groups)
    assert rewards_of(scaled) == [
        [[-0.707, 0.0], [0.707, 0.0]],
        [[-0.707, -1.0], [99.0, 0.0], [0.707, 1.0]],
    ]
    assert groups[0].rewards[0, 1] == 10.0


def test_by_batch_the_scale_is_that_of_all_groups_together():
    groups = [group("ab", rewards=[[0.0], [1.0]]), group("cd", rewards=[[2.0], [3.0]])]
    deviation = math.sqrt(5 / 3)
    wanted = [[round((r - 1.5) / (deviation + 1e-4), 3) for r in pair] for pair in ([0, 1], [2, 3])]
    assert [[row[0] for row in g] for g in rewards_of(Combiner("batch")(groups))] == wanted


def test_running_statistics_are_those_of_all_rollouts_so_far_and_survive_a_checkpoint():
    first, second = [group("ab", rewards=[[0.0], [4.0]])], [group("ab", rewards=[[NAN], [8.0]])]
    combiner = Combiner("running")
    combiner(first)
    after = Combiner("running")
    after.load_state_dict(combiner.state_dict())
    scaled = after(second)
    assert after.running == [Spread(3.0, 4.0, 32.0)]  # 0, 4, 8
    assert scaled[0].rewards[1, 0] == pytest.approx((8 - 4) / (4 + 1e-4))
    assert scaled[0].rewards[0, 0].isnan()
    assert rewards_of(combiner(second)) == rewards_of(scaled)


def test_evaluation_learns_no_statistics():
    combiner = Combiner("running")
    combiner([group("ab", rewards=[[0.0], [4.0]])])
    before = combiner.state_dict()
    combiner([group("ab", rewards=[[100.0], [400.0]])], learn=False)
    assert combiner.state_dict() == before


def test_the_bounds_hold_after_the_scale():
    groups = [group("abcd", rewards=[[0.0], [0.0], [0.0], [100.0]])]
    assert rewards_of(Combiner("group", (-0.4, 1.0))(groups)) == [[[-0.4], [-0.4], [-0.4], [1.0]]]
    assert rewards_of(Combiner("none", (-1.0, 5.0))(groups)) == [[[0.0], [0.0], [0.0], [5.0]]]


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match="reward_normalization='z' is not known"):
        Combiner("z")
    with pytest.raises(ConfigError, match="reward_clip"):
        Combiner("none", (1.0, 1.0))


def test_shares_add_to_one_and_one_that_pulls_against_the_others_is_below_zero():
    # totals 1, 3 (apart -1, 1); first reward apart -2, 2; second 1, -1
    groups = [group("ab", rewards=[[0.0, 1.0], [4.0, -1.0]])]
    shares = advantage_shares(groups, ["x", "y"], torch.tensor([1.0, 1.0]))
    assert shares["rewards/x/advantage_share"].value == pytest.approx(2.0)
    assert shares["rewards/y/advantage_share"].value == pytest.approx(-1.0)
    tied = advantage_shares([group("ab", rewards=[[1.0, 2.0], [1.0, 2.0]])], ["x", "y"], torch.ones(2))
    assert math.isnan(tied["rewards/x/advantage_share"].value)


def test_advantages_are_made_of_the_scaled_rewards_and_the_kept_ones_stay():
    groups = [group("ab", rewards=[[0.0, 0.0], [1.0, -100.0]])]
    weights = torch.ones(2)
    drowned = with_advantages(groups, from_name("dr_grpo"), weights)
    scaled = with_advantages(groups, from_name("dr_grpo"), weights, Combiner("group", num_rewards=2)(groups))
    assert drowned[0].advantages.flatten().tolist() == [49.5, -49.5]
    assert scaled[0].advantages.flatten().tolist() == pytest.approx([0.0, 0.0], abs=1e-4)
    assert torch.equal(scaled[0].rewards, groups[0].rewards)


def test_a_schedule_prints_as_it_was_given():
    assert weight_of("linear:1:0:200") == Schedule("linear", 1.0, 0.0, 200)
