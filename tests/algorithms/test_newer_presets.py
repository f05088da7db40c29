"""PKPO, MaxRL, GDPO, GFPO, CFPO, TPO, FIPO, REAL and the decoupled objective: unbiased where the paper says so, by hand where it gives numbers."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from covey.algorithms.check import step_gradients
from covey.algorithms.future_kl import discounted_future
from covey.algorithms.samples import made_tokens
from covey.environments.branches import share_advantages
from covey.errors import ConfigError
from covey.learner import Policy
from covey.learner.packing import rows_of
from covey.training.credit import with_advantages
from covey.types import EpisodeNotes, Group, Scores, Totals
from kit import completion, learner_of, prompt, tiny_model

LOGITS = torch.tensor([0.3, -0.4, 0.1], dtype=torch.float64)
NAN = math.nan


def scores_of(rewards, lengths=None):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    rewards = rewards.unsqueeze(-1) if rewards.ndim == 2 else rewards
    lengths = torch.full(rewards.shape[:2], 4) if lengths is None else torch.tensor(lengths)
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(-1)
    return Scores(per_function=rewards, weights=torch.ones(rewards.shape[-1], dtype=torch.float64), mask=mask)


def expected_gradient(advantage, payoffs, count):
    """Gradient of the logits: the mean over all groups of `count` draws of `1 / count sum A_i grad log p_i`, each by its probability."""
    logits = LOGITS[: len(payoffs)].clone().requires_grad_()
    logp = torch.log_softmax(logits, 0)
    surrogate = torch.zeros((), dtype=torch.float64)
    for drawn in itertools.product(range(len(payoffs)), repeat=count):
        chosen = torch.tensor(drawn)
        judged = advantage(scores_of([[payoffs[i] for i in drawn]]))[0]
        weight = logp[chosen].sum().exp().detach()
        surrogate = surrogate + weight * (judged * logp[chosen]).mean()
    return torch.autograd.grad(surrogate, logits)[0]


def gradient_of(value, size):
    logits = LOGITS[:size].clone().requires_grad_()
    return torch.autograd.grad(value(torch.softmax(logits, 0)), logits)[0]


def best_of(payoffs, k):
    def value(p):
        return sum(
            p[torch.tensor(drawn)].prod() * max(payoffs[i] for i in drawn)
            for drawn in itertools.product(range(len(payoffs)), repeat=k)
        )

    return value


@pytest.mark.parametrize("baseline", ["minus_one", "leave_one_out"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_pkpo_is_unbiased_for_the_best_of_k(k, baseline):
    payoffs = (0.0, 0.5, 2.0)
    found = expected_gradient(alg.PKPO(k, baseline), payoffs, count=4)
    torch.testing.assert_close(found, gradient_of(best_of(payoffs, k), 3))


def test_grpo_is_not_which_shows_that_the_test_can_fail():
    payoffs = (0.0, 0.5, 2.0)
    found = expected_gradient(alg.GroupNormalized("none"), payoffs, count=4)
    assert (found - gradient_of(best_of(payoffs, 2), 3)).abs().max() > 0.02


def test_pkpo_goes_from_the_leave_one_out_baseline_to_paying_the_best_alone():
    scores = scores_of([[1.0, 0.0, 3.0, 2.5], [1.0, 1.0, 0.0, NAN]])
    torch.testing.assert_close(alg.PKPO(1)(scores), alg.LeaveOneOut()(scores))
    full = scores_of([[1.0, 0.0, 3.0, 2.5]])
    torch.testing.assert_close(alg.PKPO(4)(full), 4 * alg.PassAtK(scale=False)(full))


def test_pkpo_by_hand():
    """Pairs of (0, 1, 3): with the 3 its bests beat the others by 3 and 2, with the 1 by 1 and 0."""
    assert alg.PKPO(2)(scores_of([[0.0, 1.0, 3.0]])).tolist() == [[0.0, 1.0, 5.0]]


def test_a_k_larger_than_the_group_is_refused_before_the_run(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), num_generations=4, algorithm="pkpo, k=5")
    with pytest.raises(ConfigError, match="needs at least 5 completions a prompt, and num_generations is 4"):
        GRPOTrainer("nowhere", lambda completions, **columns: [0.0], args)
    with pytest.raises(ConfigError, match="k=0"):
        alg.PKPO(0)


@pytest.mark.parametrize("count", [2, 4, 6])
def test_maxrl_is_the_likelihood_cut_off_one_before_the_groups_size(count):
    """Maclaurin: log p = - sum (1 - p)^j / j, over j below `count`. The second outcome is the right one."""
    found = expected_gradient(alg.MaxRL(epsilon=0.0), (0.0, 1.0), count)
    wanted = gradient_of(lambda p: -sum((1 - p[1]) ** j / j for j in range(1, count)), 2)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_gdpo_tells_apart_what_the_sum_of_rewards_does_not():
    """The paper's example: of two completions one earns 1 or 2 more; the sum, normalized, is the same for both."""
    one, both = [[[0.0, 0.0], [0.0, 1.0]]], [[[0.0, 0.0], [1.0, 1.0]]]
    summed = alg.GroupNormalized()
    torch.testing.assert_close(summed(scores_of(one)), summed(scores_of(both)), atol=1e-3, rtol=1e-3)
    apart = alg.gdpo().advantage(scores_of([*one, *both]))
    assert (apart[1, 1] / apart[0, 1]).item() == pytest.approx(2.0, rel=1e-6)


def test_gfpo_keeps_the_shortest_and_compares_them_alone():
    scores = scores_of([[1.0, 0.0, 1.0, 0.0]], lengths=[[2, 3, 9, 8]])
    kept = alg.GroupNormalized()(scores_of([[1.0, 0.0]]))[0]
    found = alg.GroupFiltered(keep=2)(scores)[0]
    torch.testing.assert_close(found, torch.stack([kept[0], kept[1], kept[0] * 0, kept[0] * 0]))


def test_gfpo_by_efficiency_keeps_most_reward_a_token_and_never_an_unscored_completion():
    part = alg.GroupFiltered(keep=2, by="efficiency")
    scores = scores_of([[1.0, 4.0, NAN, 2.0]], lengths=[[1, 8, 1, 8]])  # 1, 0.5, -, 0.25 a token
    assert part.retained(scores).tolist() == [[True, True, False, False]]
    with pytest.raises(ConfigError, match="at least 2"):
        alg.GroupFiltered(keep=1)


def test_cfpo_is_best_at_the_edge_of_the_clip_and_pulls_back_beyond_it():
    tokens = made_tokens(drift=0.0, prompts=1)
    slopes = {}
    for ratio in (1.0, 1.2, 1.5):
        leaf = torch.full_like(tokens.logp, math.log(ratio)).requires_grad_()
        at = type(tokens)(
            **{
                **tokens.tensors(),
                "logp": leaf,
                "old_logp": torch.zeros_like(leaf),
                "advantages": torch.ones(4, 1).double(),
            }
        )
        slopes[ratio] = torch.autograd.grad(alg.QuadraticPenalty(0.2)(at).sum(), leaf)[0][0, 0].item()
    assert slopes[1.0] == pytest.approx(-1.0)
    assert slopes[1.2] == pytest.approx(0.0, abs=1e-12)
    assert slopes[1.5] == pytest.approx(1.5 * (0.5 / 0.2 - 1))


def test_the_decoupled_objective_clips_around_the_learner_and_weighs_by_the_sampler():
    """AReaL, eq. 5, written out; tokens whose behaviour weight exceeds the cap are gone."""
    tokens = made_tokens(seed=1)
    found = step_gradients(alg.decoupled_ppo(cap=1.2), tokens)["logp"]
    logp = tokens.logp.detach().clone().requires_grad_()
    behaviour = (tokens.old_logp - tokens.sampler_logp).exp()
    ratio = (logp - tokens.old_logp).exp()
    surrogate = torch.minimum(ratio * tokens.advantages, ratio.clamp(0.8, 1.2) * tokens.advantages)
    kept = torch.where(behaviour <= 1.2, behaviour, 0.0)
    assert bool((behaviour > 1.2)[tokens.mask].any())
    loss = -(torch.where(tokens.mask, kept * surrogate, 0.0)).sum() / tokens.mask.sum()
    torch.testing.assert_close(found, torch.autograd.grad(loss, logp)[0])


def cross_entropy(tokens, temperature, level):
    """The paper's loss by autograd: mean over groups of the cross-entropy to the target."""
    found = []
    for one in tokens.group.unique():
        rows = (tokens.group == one) & tokens.mask.any(-1)
        lengths = tokens.mask[rows].sum(-1) if level == "sequence" else 1
        now, old = ((logp * tokens.mask)[rows].sum(-1) / lengths for logp in (tokens.logp, tokens.old_logp))
        target = torch.softmax(old + tokens.advantages[rows, 0] / temperature, 0)
        found.append(-(target * torch.log_softmax(now, 0)).sum())
    return torch.stack(found).mean()


@pytest.mark.parametrize("level", ["product", "sequence"])
def test_tpo_has_the_gradient_of_the_cross_entropy_to_its_target_in_micro_batches_too(level):
    tokens = made_tokens(seed=3, drift=0.3)
    expected = torch.autograd.grad(cross_entropy(tokens, 0.5, level), tokens.logp)[0]
    totals = Totals.of(tokens.mask, tokens.group, 16)
    whole = alg.TargetPolicy(0.5, level)
    prepared = whole.prepare(tokens.detached(), totals)
    half = len(tokens.group) // 2 + 1
    shares = [alg.SequenceSum()(prepared(part), part, totals) for part in (tokens.rows(0, half), tokens.rows(half, 99))]
    for loss in (alg.SequenceSum()(whole(tokens), tokens, totals), sum(shares)):
        torch.testing.assert_close(torch.autograd.grad(loss, tokens.logp, retain_graph=True)[0], expected)


def test_tpo_has_no_gradient_where_the_policy_is_the_target():
    tokens = made_tokens(seed=4, drift=0.0, prompts=1)
    tokens = replace(tokens, mask=torch.ones_like(tokens.mask))
    assert alg.TargetPolicy().pull(tokens).abs().max() > 0.1
    flat = replace(tokens, advantages=torch.zeros_like(tokens.advantages))
    there = replace(tokens, logp=tokens.old_logp + tokens.advantages / tokens.lengths)
    for one in (flat, there):
        assert alg.TargetPolicy().pull(one).abs().max() == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ConfigError, match="TargetPolicy's temperature=0.0 must be above 0"):
        alg.TargetPolicy(0.0)


def test_fipo_weighs_a_token_by_the_discounted_log_ratios_from_it_on():
    """Written out, token by token: F_t = d_t + gamma F_(t+1), its exponential clipped, held back where it would push down too far."""
    tokens = made_tokens(seed=5, drift=0.3)
    part = alg.FutureKL(half_life=3.0, clip=0.2, both_sides=True, safe_ratio=1.1)
    gamma, found = 2 ** (-1 / 3), part(tokens)
    held = 0
    for row in range(len(tokens.mask)):
        future = 0.0
        for place in reversed(range(tokens.mask.shape[1])):
            moved = tokens.log_ratio[row, place].item()
            future = moved + gamma * future
            if not tokens.mask[row, place]:
                continue
            weight = min(max(math.exp(future), 0.8), 1.2)
            if tokens.advantages[row, 0] < 0 and math.exp(moved) > 1.1:
                held, weight = held + 1, min(max(weight, 0.8), 1.0)
            assert found[row, place].item() == pytest.approx(weight, abs=1e-9)
    assert held > 0
    assert not found.requires_grad


def test_fipo_of_a_long_completion_is_summed_in_blocks():
    tokens = made_tokens(seed=5, drift=0.3)
    moved = torch.randn(2, 700, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    powers = 0.9 ** torch.arange(700, dtype=torch.float64)
    expected = torch.stack([(moved[:, t:] * powers[: 700 - t]).sum(-1) for t in range(700)], -1)
    torch.testing.assert_close(discounted_future(moved, 0.9), expected)
    limited = alg.FutureKL(limit=1.0).future(tokens)
    lowered = replace(tokens, logp=torch.minimum(tokens.logp, tokens.old_logp))
    torch.testing.assert_close(limited, alg.FutureKL().future(lowered))


def test_fipo_is_dapo_in_the_first_update_on_a_rollout():
    tokens = made_tokens(seed=6, drift=0.0)
    tokens = replace(tokens, logp=tokens.old_logp.detach().clone().requires_grad_())
    one, other = (step_gradients(preset, tokens)["logp"] for preset in (alg.fipo(), alg.dapo()))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("preset", [alg.tpo, alg.real])
@pytest.mark.parametrize("lost", ["unscored", "truncated"])
def test_a_completion_that_nobody_scored_or_that_is_masked_moves_no_sibling(preset, lost):
    """The step on three completions of a group, of which one is lost, is that on the two others."""
    finish = ("stop", "stop", "length" if lost == "truncated" else "stop")
    ids = ([40, 41, 42, 43], [50, 51, 52], [60, 61])
    drawn = tuple(
        completion(ids=each, finish=end, old_logp=torch.full((len(each),), -5.9))
        for each, end in zip(ids, finish, strict=True)
    )
    rewards = torch.tensor([[1.0], [0.0], [NAN if lost == "unscored" else 0.5]])
    algorithm = preset().replace(advantage=alg.GroupNormalized("none"))  # 0.5 and -0.5 with the third and without
    moved = []
    for kept in ([0, 1, 2], [0, 1]):
        part = Group(prompt=prompt(), completions=drawn, rewards=rewards).take(kept)
        (judged,) = with_advantages([part], algorithm, torch.ones(1))
        model = tiny_model()
        policy = Policy(model=model, pad_id=0, temperature=1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        learner = learner_of(policy, optimizer, max_completion_length=4, mask_truncated=True, max_grad_norm=0.0)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        learner.step([judged], algorithm, 1)
        moved.append([after.detach() - start for after, start in zip(model.parameters(), before, strict=True)])
    assert max(float(change.abs().max()) for change in moved[1]) > 1e-3
    for whole, alone in zip(*moved, strict=True):
        torch.testing.assert_close(whole, alone, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("preset", [alg.tpo, alg.real])
def test_a_branch_is_trained_with_the_advantage_of_its_episode(preset):
    """A reward scores the episode alone, and the steps with and without its branch differ."""
    branch = replace(completion(ids=[60, 61]), episode=EpisodeNotes(shares=1))
    drawn = [completion(ids=ids) for ids in ([40, 41, 42, 43], [50, 51, 52], [70, 71])] + [branch]
    drawn = tuple(replace(each, old_logp=torch.full((each.num_tokens,), -5.9)) for each in drawn)
    algorithm = preset().replace(advantage=alg.GroupNormalized("none"))

    def weights_after(kept):
        group = Group(prompt=prompt(), completions=drawn, rewards=torch.tensor([[1.0], [0.0], [0.2], [NAN]])).take(kept)
        (judged,) = with_advantages([group], algorithm, torch.ones(1))
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        learner = learner_of(Policy(model=model, pad_id=0, temperature=1.0), optimizer, max_completion_length=4)
        learner.step([share_advantages(judged)], algorithm, 1)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert (weights_after(range(4)) - weights_after(range(3))).abs().max() > 1e-3


@pytest.mark.parametrize("preset", [alg.tpo, alg.real])
def test_a_branch_of_an_episode_that_lost_its_judge_is_in_no_sum(preset):
    branch = replace(completion(ids=[60, 61]), episode=EpisodeNotes(shares=2))
    drawn = [completion(ids=ids) for ids in ([40, 41, 42, 43], [50, 51, 52], [70, 71])] + [branch]
    drawn = tuple(replace(each, old_logp=torch.full((each.num_tokens,), -5.9)) for each in drawn)
    group = Group(prompt=prompt(), completions=drawn, rewards=torch.tensor([[1.0], [0.0], [NAN], [NAN]]))
    (judged,) = with_advantages([group], preset().replace(advantage=alg.GroupNormalized("none")), torch.ones(1))
    shared = share_advantages(judged)
    assert [row.is_scored for row in rows_of([shared])] == [True, True, False, False]
    assert shared.completions[3].episode.shares == 2  # the column `branch_of` of rollouts/


def labels_loss(tokens, tau):
    """The paper's loss by autograd: the mean over groups of both logarithms, 0 for a group of one kind."""
    found = []
    for one in tokens.group.unique():
        rows = (tokens.group == one) & tokens.mask.any(-1)
        score = (tokens.log_ratio[rows].sum(-1) / tokens.mask[rows].sum(-1)) / tau
        right = tokens.advantages[rows, 0] > 0
        if right.all() or not right.any():
            found.append(0.0 * score.sum())
            continue
        found.append((1 + (-score[right]).exp().sum()).log() + (1 + score[~right].exp().sum()).log())
    return torch.stack(found).mean()


@pytest.mark.parametrize("tau", [0.5, 2.0])
def test_real_has_the_gradient_of_its_two_logarithms_in_micro_batches_too(tau):
    tokens = made_tokens(seed=7, drift=0.3)
    expected = torch.autograd.grad(labels_loss(tokens, tau), tokens.logp, retain_graph=True)[0]
    totals = Totals.of(tokens.mask, tokens.group, 16)
    whole = alg.RewardsAsLabels(tau)
    prepared = whole.prepare(tokens.detached(), totals)
    half = len(tokens.group) // 2 + 1
    mean = alg.SequenceMean()
    shares = [mean(prepared(part), part, totals) for part in (tokens.rows(0, half), tokens.rows(half, 99))]
    for loss in (mean(whole(tokens), tokens, totals), sum(shares)):
        torch.testing.assert_close(torch.autograd.grad(loss, tokens.logp, retain_graph=True)[0], expected)


def test_real_bounds_the_gradient_of_a_completion_that_left_the_policy_far_behind():
    tokens = made_tokens(seed=8, drift=0.0)
    for shift in (-50.0, 50.0):
        away = replace(tokens, logp=tokens.old_logp + shift)
        assert alg.RewardsAsLabels(0.5).pull(away).abs().max() <= 2.0 * tokens.group.bincount().max() + 1e-9
    with pytest.raises(ConfigError, match="temperature=0.0 must be above 0"):
        alg.RewardsAsLabels(0.0)
    with pytest.raises(ConfigError, match="half_life=0.0 must be above 0"):
        alg.FutureKL(half_life=0.0)
