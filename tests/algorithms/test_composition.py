"""The record of parts: what it accepts, what it says about mistakes, what it asks the learner for."""

import math

import pytest
import torch

from covey import algorithms as alg
from covey.algorithms.samples import made_scores, made_tokens
from covey.errors import ConfigError
from covey.types import Last, Mean, StepReport, Totals

TOKENS = made_tokens()
TOTALS = Totals.of(TOKENS.mask, TOKENS.group, 16)


def test_replacing_a_part_keeps_the_others_and_says_so_in_the_name():
    mine = alg.dapo().replace(aggregate=alg.prompt_mean)
    assert mine.objective == alg.dapo().objective
    assert mine.name == "dapo+aggregate"
    assert alg.dapo().replace(name="mine").name == "mine"


@pytest.mark.parametrize(
    "slots, said",
    [
        ({"objectve": alg.policy_gradient}, "Did you mean objective?"),
        ({"objective": 3}, "objective=3 is not callable"),
        ({"objective": alg.Clipped}, "give an instance: Clipped()"),
        ({"kl": "k3"}, "neither an alg.KL, nor a coefficient"),
        ({"critic": object()}, "alg.Critic(error=your_function)"),
        ({"weights": (1.0,)}, "weights=1.0 is not callable"),
    ],
)
def test_a_part_that_cannot_be_is_refused_in_one_sentence(slots, said):
    with pytest.raises(ConfigError) as caught:
        alg.grpo().replace(**slots)
    assert said in str(caught.value)


def test_a_kl_may_be_a_number_or_an_estimator():
    assert alg.grpo().replace(kl=0.1).kl == alg.KL(alg.k3, 0.1)
    assert alg.grpo().replace(kl=alg.k2).kl.estimator is alg.k2
    assert alg.grpo().replace(kl=0).kl is None
    assert alg.grpo(kl=None).kl is None


def test_one_regularizer_need_not_be_a_tuple():
    bonus = alg.entropy_bonus(0.01)
    assert alg.grpo().replace(regularizers=bonus).regularizers == (bonus,)
    assert alg.grpo().replace(regularizers=[bonus]).regularizers == (bonus,)


def mean_loss(tokens):
    return (tokens.ratio * tokens.advantages).mean()


def test_a_part_that_takes_the_mean_itself_is_told_what_to_return():
    with pytest.raises(ValueError, match=r"mean_loss \(objective\) returned shape \[\]; .*\[N, T\] = \[12, 7\]"):
        alg.grpo(kl=None).replace(objective=mean_loss).loss(TOKENS, TOTALS)
    with pytest.raises(ValueError, match=r"mean_loss \(regularizer\)"):
        alg.grpo(kl=None).replace(regularizers=mean_loss).loss(TOKENS, TOTALS)
    with pytest.raises(ValueError, match=r"\(advantage\) returned shape \[3, 1\]; it must return \[P, G\] = \[3, 4\]"):
        alg.grpo().replace(advantage=lambda scores: scores.total[:, :1]).judge(made_scores())


def test_a_metric_of_another_shape_is_told_what_to_return():
    class Odd:
        def __call__(self, tokens):
            return tokens.logp

        def metrics(self, tokens):
            return {"odd": tokens.logp.mean(0)}

    with pytest.raises(ValueError, match=r"metric 'odd' has shape \[7\]"):
        alg.grpo(kl=None).replace(objective=Odd()).metrics(TOKENS, TOTALS)


def test_weights_multiply_the_objective_without_gradient_and_never_the_kl():
    halved = lambda tokens: torch.full_like(tokens.logp, 0.5) * (tokens.logp - tokens.logp.detach() + 1)
    plain, kl = alg.grpo(kl=None, correction=None), alg.grpo(correction=None)
    only_kl = kl.loss(TOKENS, TOTALS) - plain.loss(TOKENS, TOTALS)
    weighed = kl.replace(weights=halved).loss(TOKENS, TOTALS)
    assert torch.isclose(weighed, 0.5 * plain.loss(TOKENS, TOTALS) + only_kl)
    slope = torch.autograd.grad(plain.replace(weights=halved).loss(TOKENS, TOTALS), TOKENS.logp)[0]
    assert torch.allclose(slope, 0.5 * torch.autograd.grad(plain.loss(TOKENS, TOTALS), TOKENS.logp)[0])


def test_a_regularizer_is_averaged_like_the_loss_unless_it_brings_its_own_mean():
    bonus = alg.entropy_bonus(0.1)
    base = alg.grpo(kl=None, correction=None)
    extra = base.replace(regularizers=bonus).loss(TOKENS, TOTALS) - base.loss(TOKENS, TOTALS)
    assert torch.isclose(extra, -0.1 * TOKENS.per_sequence(TOKENS.entropy).mean())
    own = alg.EntropyBonus(0.1, aggregate=alg.token_mean)
    extra = base.replace(regularizers=own).loss(TOKENS, TOTALS) - base.loss(TOKENS, TOTALS)
    assert torch.isclose(extra, -0.1 * TOKENS.entropy[TOKENS.mask].mean())


def test_what_is_asked_of_the_learner_follows_from_the_parts():
    assert alg.dapo(correction=None).needs == alg.Needs()
    assert alg.grpo().needs.ref_logp
    assert alg.dapo().needs.sampler_logp
    assert alg.ppo().needs.values
    assert alg.remax().needs.greedy
    assert alg.rloo().needs.old_logp
    assert alg.dapo().replace(regularizers=alg.entropy_bonus(0.1)).needs.entropy
    for part in (alg.ClipCov(), alg.KLCov(), alg.GMPO(only=alg.TopEntropy())):
        assert alg.dapo().replace(objective=part).needs.whole_step
    assert alg.dapo().replace(weights=alg.Correction(normalize=True)).needs.whole_step
    assert not alg.dapo().replace(weights=alg.Correction()).needs.whole_step


def test_a_function_says_what_it_needs_and_a_typo_is_found():
    part = lambda tokens: tokens.ref_logp
    part.needs = ("ref_logp",)
    assert alg.dapo().replace(regularizers=part).needs.ref_logp
    part.needs = ("reflogp",)
    with pytest.raises(ConfigError, match=r"needs 'reflogp', which nobody provides. Did you mean ref_logp\?"):
        _ = alg.dapo().replace(regularizers=part).needs


def test_judging_gives_zero_where_nobody_scored_and_targets_only_with_a_critic():
    scores = made_scores(torch.tensor([[[1.0], [math.nan], [0.0]]]).double())
    careless = alg.grpo().replace(advantage=lambda scores: scores.total - 1.0)
    advantages, returns = careless.judge(scores)
    assert advantages.tolist() == [[0.0, 0.0, -1.0]]
    assert returns is None
    assert alg.ppo().judge(scores)[1].shape == scores.mask.shape


def test_a_critic_beside_an_advantage_without_targets_learns_the_reward_to_go():
    scores = made_scores()
    _, returns = alg.grpo().replace(critic=alg.Critic()).judge(scores)
    assert torch.allclose(returns[..., 0], scores.total)


def test_target_kl_ends_the_use_of_a_rollout():
    mine = alg.dapo().replace(target_kl=0.02)
    seen = lambda kl: StepReport(step=1, metrics={"approx_kl": Mean(kl, 1.0)})
    assert mine.has_left(seen(0.03))
    assert not mine.has_left(seen(0.01))
    assert not mine.has_left(StepReport(step=1, metrics={}))
    assert not alg.dapo().has_left(seen(9.0))


def test_adaptive_entropy_applies_only_after_a_step_of_low_entropy():
    bonus = alg.EntropyBonus(alg.AdaptiveEntropy(target=0.5, start=0.01, delta=0.004, low=0.0, high=0.02))
    mine = alg.dapo().replace(regularizers=bonus)
    memory, applied = mine.initial_controllers(), []
    for entropy in (0.4, 0.4, 0.9, 0.4):
        now = mine.resolve(memory)
        applied.append(now.regularizers[0].coefficient)
        memory = mine.advance(memory, StepReport(step=1, metrics={"entropy": Mean(entropy, 1.0)}))
    assert applied == pytest.approx([0.0, 0.014, 0.018, 0.0])
    assert mine.resolve(memory).metrics(TOKENS, TOTALS)["entropy_coef"] == Last(pytest.approx(0.018))


def test_a_whole_step_is_measured_once_and_then_used_for_every_micro_batch():
    mine = alg.dapo().replace(weights=alg.TopEntropy(0.3), regularizers=alg.EntropyBonus(0.1, alg.TopEntropy(0.3)))
    prepared = mine.prepare(TOKENS.detached(), TOTALS)
    assert prepared.weights[0].bound == prepared.regularizers[0].only.bound
    assert prepared.prepare(TOKENS.detached(), TOTALS) == prepared


def test_rules_for_the_reference_model():
    at = lambda step, **metrics: StepReport(
        step=step, metrics={name: Mean(value, 1.0) for name, value in metrics.items()}
    )
    assert [alg.Every(2, 0.6)(at(step)) for step in (1, 2, 3, 4)] == [0.0, 0.6, 0.0, 0.6]
    assert alg.EMA(0.99)(at(1)) == pytest.approx(0.01)
    assert [alg.WhenFar(0.05)(at(1, kl=kl)) for kl in (0.04, 0.06)] == [0.0, 1.0]
    assert alg.WhenFar(0.05)(at(1)) == 0.0
    assert alg.keep(at(512)) == 0.0
