"""Advantages by hand: rewards of 1, 0, 0, 1 and their like."""

import math
from dataclasses import replace

import pytest
import torch

from covey import algorithms as alg
from covey.algorithms.samples import made_scores
from covey.types import Scores

NAN = math.nan


def scores_of(rewards, lengths=None, weights=None, **more):
    """Scores of rewards [P][G] or [P][G][R]."""
    rewards = torch.tensor(rewards, dtype=torch.float64)
    rewards = rewards.unsqueeze(-1) if rewards.ndim == 2 else rewards
    lengths = torch.full(rewards.shape[:2], 4) if lengths is None else torch.tensor(lengths)
    weights = torch.ones(rewards.shape[-1], dtype=torch.float64) if weights is None else torch.tensor(weights).double()
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(-1)
    return Scores(per_function=rewards, weights=weights, mask=mask, **more)


def close(found, wanted, **tolerance):
    return torch.allclose(
        found, torch.tensor(wanted, dtype=torch.float64), **({"rtol": 1e-6, "atol": 1e-9} | tolerance)
    )


def test_group_normalized_divides_by_the_sample_deviation_plus_epsilon():
    deviation = math.sqrt(4 * 0.25 / 3)
    one = 0.5 / (deviation + 1e-4)
    assert close(alg.GroupNormalized()(scores_of([[1, 0, 0, 1]])), [[one, -one, -one, one]])


def test_batch_scale_keeps_the_mean_of_the_group_and_takes_the_deviation_of_all():
    rewards = [[1, 0], [5, 5]]
    deviation = torch.tensor([1.0, 0.0, 5.0, 5.0]).double().std().item()
    one = 0.5 / (deviation + 1e-4)
    assert close(alg.GroupNormalized("batch")(scores_of(rewards)), [[one, -one], [0, 0]])


def test_no_scale_only_centres():
    assert close(alg.GroupNormalized("none")(scores_of([[3, 0, 0, 1]])), [[2, -1, -1, 0]])


def test_an_unscored_completion_gets_nothing_and_moves_nothing():
    found = alg.GroupNormalized("none")(scores_of([[1, NAN, 0, 0.5]]))
    assert close(found, [[0.5, 0, -0.5, 0]])


def test_a_group_of_one_gets_zero_or_its_own_reward():
    assert close(alg.GroupNormalized()(scores_of([[3.0]])), [[0]])
    assert close(alg.GroupNormalized(epsilon=1e-6, singleton="keep")(scores_of([[3.0]])), [[3 / (1 + 1e-6)]])


def test_a_nearly_tied_group_in_float32_is_tied_when_only_rounding_differs():
    a, b = torch.tensor(0.1) + torch.tensor(0.2), torch.tensor(0.3)
    rewards = torch.stack([a, b, a, b]).reshape(1, 4, 1)
    scores = Scores(per_function=rewards, weights=torch.ones(1), mask=torch.ones(1, 4, 2, dtype=torch.bool))
    assert not alg.GroupNormalized(epsilon=1e-9)(scores).any()


def test_a_small_but_real_difference_still_teaches():
    assert alg.GroupNormalized()(scores_of([[0.5, 0.5001, 0.5, 0.5]]))[0, 1] > 0.5


def test_several_rewards_are_summed_by_weight_and_missing_ones_count_nothing():
    rewards = [[[1, 2], [NAN, 1], [0, NAN], [NAN, NAN]]]
    found = alg.GroupNormalized("none")(scores_of(rewards, weights=[1.0, 0.5]))
    total = [2.0, 0.5, 0.0]  # the last one is unscored
    mean = sum(total) / 3
    assert close(found, [[total[0] - mean, total[1] - mean, total[2] - mean, 0]])


def test_normalizing_first_gives_rewards_of_any_scale_the_same_say():
    rewards = [[[0.0, 1000.0], [1.0, 1000.0], [0.0, 0.0], [1.0, 0.0]]]
    apart = alg.NormalizeThenSum()(scores_of(rewards))[0]
    assert apart[1] > 1
    assert abs(apart[0]) < 1e-3
    assert abs(apart[3]) < 1e-3
    summed = alg.GroupNormalized()(scores_of(rewards))[0]
    assert summed[0] > 0.8  # summed first, the large one decides alone


def test_normalized_rewards_that_cancel_teach_nothing_and_not_their_rounding():
    right = torch.tensor([[0.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    scores = replace(scores_of([[[0, 0]]]), per_function=torch.stack([right, 1 - right], -1), weights=torch.ones(2))
    assert not alg.NormalizeThenSum()(scores).any()
    generator = torch.Generator().manual_seed(0)
    for size in (1.0, 1e-3, 0.0):  # near a half, the rounding of a reward is large beside the deviation
        right = 0.5 + size * (torch.rand(64, 2, 8, generator=generator) - 0.5)
        both = torch.stack([right, 1 - right], -1)
        step = lambda rewards: replace(scores_of([[0.0] * 8] * 2), per_function=rewards, weights=torch.ones(2))
        assert not any(alg.NormalizeThenSum()(step(rewards)).any() for rewards in both)
    apart = torch.tensor(
        [[[1e6, 0.0], [1e6, 0.0], [1e6 + 1, 0.0]]]
    )  # a difference that float32 holds is none of rounding
    assert alg.NormalizeThenSum()(replace(scores_of([[0.0] * 3]), per_function=apart, weights=torch.ones(2))).any()


def test_leave_one_out_compares_with_the_mean_of_the_others():
    assert close(alg.LeaveOneOut()(scores_of([[3, 0, 0, 1]])), [[3 - 1 / 3, -4 / 3, -4 / 3, 1 - 1]])


def test_leave_one_out_clips_rewards_before_a_kl_in_the_reward():
    kl = torch.zeros(1, 2, 4, dtype=torch.float64)
    kl[0, 0] = 0.25  # four tokens: 1 in total
    found = alg.LeaveOneOut(clip=(-1.0, 1.0))(scores_of([[9, 0]], kl=kl))
    assert close(found, [[0, 0]])


def test_pass_at_k_pays_the_best_its_lead():
    assert close(alg.PassAtK(scale=False)(scores_of([[3, 0, 2, 1]])), [[1, 0, 0, 0]])
    assert close(alg.PassAtK(scale=False)(scores_of([[3, NAN, NAN, NAN]])), [[0, 0, 0, 0]])


def test_the_length_weighted_baseline_weighs_by_tokens():
    found = alg.OPO()(scores_of([[1, 0]], lengths=[[3, 1]]))
    assert close(found, [[0.25, -0.75]])


def test_gpg_rescales_for_completions_that_earned_nothing():
    assert close(alg.GPG()(scores_of([[1, 0, 0, 0]])), [[3, -1, -1, -1]])  # 4 completions, 1 that earned


def test_maxrl_weighs_hard_prompts_more():
    assert close(alg.MaxRL(epsilon=0.0)(scores_of([[1, 0, 0, 0], [1, 1, 1, 0]])), [[3, -1, -1, -1], [1 / 3] * 3 + [-1]])


def test_maxrl_never_pays_the_worse_completion():
    assert close(alg.MaxRL()(scores_of([[-1, 0, -1, 0], [0, 0, 0, 0]])), [[0] * 4] * 2)


def test_soft_overlong_falls_linearly_over_its_buffer():
    shape = alg.SoftOverlong(max_length=10, buffer=4)
    assert close(shape(scores_of([[0, 0, 0, 0]], lengths=[[6, 8, 10, 12]])), [[0, -0.5, -1, -1]])


def test_shaped_rewards_reach_the_advantage():
    shaped = alg.Shaped(alg.GroupNormalized("none"), (alg.LengthPenalty(0.1),))
    assert close(shaped(scores_of([[1, 1]], lengths=[[2, 4]])), [[0.1, -0.1]])
    assert close(shaped(scores_of([[1, NAN]], lengths=[[2, 4]])), [[0, 0]])


@pytest.mark.parametrize("name", ["rloo", "grpo"])
def test_a_kl_in_the_reward_is_taken_before_comparing(name):
    kl = torch.zeros(1, 2, 4, dtype=torch.float64)
    kl[0, 1, 0] = 0.5
    advantage = alg.PRESETS[name]().advantage
    assert advantage(scores_of([[1, 1]], kl=kl))[0, 0] > 0


def test_a_step_with_one_score_has_its_own_unit_at_either_scale():
    rewards = torch.tensor([[[2.0], [math.nan]], [[math.nan], [math.nan]]], dtype=torch.float64)
    for scale in ("group", "batch"):
        judged = alg.GroupNormalized(scale, singleton="keep")(made_scores(rewards))
        assert judged.tolist() == [[pytest.approx(2.0 / 1.0001), 0.0], [0.0, 0.0]]


def test_rewards_of_tokens_are_one_more_function_of_decoupled_normalization():
    scores = made_scores(prompts=4, group_size=5, length=6)
    of_tokens = torch.rand(4, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    summed = (of_tokens * scores.mask).sum(-1, keepdim=True)
    both = torch.cat([scores.per_function, summed], -1)
    as_function = replace(scores, per_function=both, weights=torch.ones(2, dtype=torch.float64))
    judged = alg.NormalizeThenSum()(replace(scores, per_token=of_tokens))
    torch.testing.assert_close(judged, alg.NormalizeThenSum()(as_function))
    assert not torch.allclose(judged, alg.NormalizeThenSum()(scores))
