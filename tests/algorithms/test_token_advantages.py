"""Reward-to-go, GAE and whitening by hand, with tokens in between that the model did not write."""

from math import nan

import torch

from covey import algorithms as alg
from covey.algorithms.token_advantages import gae, optimal_token_baseline, reward_to_go, token_rewards, whiten
from covey.types import Completion, Group, Prompt, Scores

ROW = torch.tensor([[True, False, True, True, False]])


def numbers(*values):
    return torch.tensor([values], dtype=torch.float64)


def scores_of(rewards, mask, **more):
    rewards = torch.tensor(rewards, dtype=torch.float64).unsqueeze(-1)
    return Scores(per_function=rewards, weights=torch.ones(1).double(), mask=mask, **more)


def test_a_reward_sits_at_the_last_token_that_the_model_wrote():
    found = token_rewards(scores_of([[2.0]], ROW.unsqueeze(0)))
    assert found.tolist() == [[[0, 0, 0, 2, 0]]]


def test_a_kl_is_taken_from_each_token_and_rewards_of_single_tokens_are_added():
    kl, extra = torch.full((1, 1, 5), 0.5).double(), torch.tensor([[[1.0, 9, 0, 0, 9]]]).double()
    found = token_rewards(scores_of([[2.0]], ROW.unsqueeze(0), kl=kl, per_token=extra))
    assert found.tolist() == [[[0.5, 0, -0.5, 1.5, 0]]]


def test_a_completion_without_a_token_or_a_score_earns_nothing():
    mask = torch.stack([torch.zeros_like(ROW), ROW])
    found = token_rewards(scores_of([[2.0], [torch.nan]], mask))
    assert not found.any()


def test_reward_to_go_discounts_by_tokens_that_count():
    rewards = numbers(1, 7, 2, 4, 7)
    assert reward_to_go(rewards, ROW, 0.5).tolist() == [[1 + 0.5 * (2 + 0.5 * 4), 0, 4, 4, 0]]
    assert reward_to_go(rewards, ROW, 0.5, across_gaps=False).tolist() == [[1, 0, 4, 4, 0]]


def test_gae_skips_tokens_the_model_did_not_write():
    rewards, values = numbers(0, 9, 0, 1, 9), numbers(0.5, 9, 0.25, 0.5, 9)
    last = 1 - 0.5
    middle = 0.9 * 0.5 - 0.25 + 0.9 * 0.8 * last
    first = 0.9 * 0.25 - 0.5 + 0.9 * 0.8 * middle
    assert torch.allclose(gae(rewards, values, ROW, 0.9, 0.8), numbers(first, 0, middle, last, 0))


def test_gae_with_lambda_one_is_the_return_minus_the_value():
    rewards, values = numbers(0, 0, 0, 1, 0), numbers(0.5, 9, 0.25, 0.5, 9)
    returns = reward_to_go(rewards, ROW)
    assert torch.allclose(gae(rewards, values, ROW, 1.0, 1.0), torch.where(ROW, returns - values, 0.0))


def test_whitening_looks_only_at_tokens_that_count():
    found = whiten(numbers(1, 100, 2, 3, 100), ROW)
    assert torch.allclose(found, numbers(-1, 0, 0, 1, 0))


def test_whitening_one_token_or_equal_ones_gives_zero():
    assert not whiten(numbers(3, 3, 3, 3, 3), ROW).any()
    assert not whiten(numbers(3, 0, 0, 0, 0), torch.tensor([[True, False, False, False, False]])).any()


def test_remax_compares_with_the_greedy_answer():
    scores = scores_of([[1.0, 0.0]], torch.ones(1, 2, 3, dtype=torch.bool), greedy=torch.tensor([0.25]))
    assert alg.ReMax()(scores)[0, :, 0].tolist() == [0.75, -0.25]


def test_a_prompt_whose_greedy_answer_nobody_scored_has_no_baseline_and_teaches_nothing():
    rewards, weights = torch.tensor([[1.0, 2.0], [0.5, 0.0]]), torch.tensor([1.0, 2.0])

    def group(uid, greedy):
        drawn = Completion(token_ids=torch.tensor([5, 6]), text="", finish="stop")
        prompt = Prompt(uid=uid, token_ids=(5,))
        return Group(prompt=prompt, completions=(drawn, drawn), rewards=rewards, greedy_rewards=torch.tensor(greedy))

    scores = Scores.of([group("0:0", [nan, nan]), group("0:1", [nan, 1.0])], weights)
    assert torch.equal(scores.greedy.isnan(), torch.tensor([True, False]))
    assert alg.ReMax()(scores)[:, :, 0].tolist() == [[0.0, 0.0], [3.0, -1.5]]


def test_a_completion_that_nobody_scored_has_no_target_for_the_critic():
    rewards = torch.tensor([[[1.0], [nan]]]).double()
    scores = Scores(
        per_function=rewards,
        weights=torch.ones(1).double(),
        mask=torch.ones(1, 2, 3, dtype=torch.bool),
        values=torch.full((1, 2, 3), 0.25).double(),
    )
    for algorithm in (alg.ppo(), alg.grpo(kl=None).replace(critic=alg.Critic())):
        advantages, returns = algorithm.judge(scores)
        assert advantages[0, 1].flatten().tolist() == [0.0] * advantages[0, 1].numel()
        assert bool(returns[0, 0].isfinite().all())
        assert bool(returns[0, 1].isnan().all())


def test_the_critics_targets_are_the_advantages_plus_the_values():
    mask, values = torch.ones(1, 2, 3, dtype=torch.bool), torch.rand(1, 2, 3).double()
    scores = scores_of([[1.0, 0.0]], mask, values=values)
    plain = alg.GAE(whitens=False)
    assert torch.allclose(plain(scores) + values, plain.returns(scores))
    assert torch.allclose(
        alg.GAE(gamma=1.0, lam=1.0).returns(scores), torch.tensor([1.0, 0.0]).double()[None, :, None].expand(1, 2, 3)
    )


def test_the_optimal_token_baseline_with_equal_weights_is_the_mean_of_the_group():
    mask = torch.ones(1, 2, 3, dtype=torch.bool)
    scores = scores_of([[1.0, 0.0]], mask)
    found = optimal_token_baseline(scores, torch.full((1, 2, 3), 1.3).double())
    assert torch.allclose(found, torch.tensor([0.5, -0.5]).double()[None, :, None].expand(1, 2, 3))
