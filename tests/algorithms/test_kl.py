"""KL estimators against the true KL of small distributions, and KL terms in the loss, in the reward and with memory."""

import math

import pytest
import torch

from covey import algorithms as alg
from covey.types import Mean, StepReport, Sum, TokenBatch, Totals

POLICY = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
DRAWN = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
TRUE = (POLICY * (POLICY / REFERENCE).log()).sum().item()


def test_by_hand():
    logp, ref = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    gap = math.log(2)
    assert alg.k1(logp, ref).item() == pytest.approx(gap)
    assert alg.k2(logp, ref).item() == pytest.approx(gap**2 / 2)
    assert alg.k3(logp, ref).item() == pytest.approx(0.5 - 1 + gap)
    assert alg.abs_kl(ref, logp).item() == pytest.approx(gap)


@pytest.mark.parametrize("name", ["k1", "k3", "k1+", "k3+"])
def test_the_mean_over_the_policys_own_draws_is_the_true_kl(name):
    values = alg.ESTIMATORS[name](POLICY.log(), REFERENCE.log())
    assert (POLICY * values).sum().item() == pytest.approx(TRUE)


def batch(logits):
    """Each outcome as a completion of one token, drawn by DRAWN."""
    logp = logits.log_softmax(0)
    return TokenBatch(
        logp=logp.unsqueeze(1),
        old_logp=DRAWN.log().unsqueeze(1),
        advantages=torch.zeros(3, 1, dtype=torch.float64),
        mask=torch.ones(3, 1, dtype=torch.bool),
        group=torch.zeros(3, dtype=torch.long),
        ref_logp=REFERENCE.log().unsqueeze(1),
    )


def test_the_unbiased_kl_has_the_gradient_of_the_true_kl_off_policy():
    logits = POLICY.log().requires_grad_()
    true = (logits.softmax(0) * (logits.log_softmax(0) - REFERENCE.log())).sum()
    wanted = torch.autograd.grad(true, logits)[0]
    for unbiased, is_right in ((True, True), (False, False)):
        estimate = alg.KL(alg.k3, 1.0, unbiased=unbiased).measured(batch(logits))
        found = torch.autograd.grad((DRAWN.unsqueeze(1) * estimate).sum(), logits)[0]
        assert torch.allclose(found, wanted) == is_right


def test_the_straight_through_form_has_the_right_gradient_on_policy():
    logits = POLICY.log().requires_grad_()
    true = (logits.softmax(0) * (logits.log_softmax(0) - REFERENCE.log())).sum()
    wanted = torch.autograd.grad(true, logits)[0]
    for name, is_right in (("k3+", True), ("k1+", True), ("k2", True), ("k3", False), ("k1", False)):
        estimate = alg.ESTIMATORS[name](logits.log_softmax(0), REFERENCE.log())
        found = torch.autograd.grad((POLICY * estimate).sum(), logits)[0]
        assert torch.allclose(found, wanted) == is_right, name


def test_in_the_loss_it_is_weighed_and_averaged_like_the_rest():
    tokens = batch(POLICY.log())
    algorithm = alg.Algorithm(kl=alg.KL(alg.k2, 0.5))
    wanted = 0.5 * alg.k2(POLICY.log(), REFERENCE.log()).mean()
    totals = Totals.of(tokens.mask, tokens.group, 1)
    assert torch.isclose(algorithm.loss(tokens, totals), wanted)
    assert algorithm.metrics(tokens, totals)["kl"].value == pytest.approx(wanted.item() / 0.5)


def test_in_the_reward_it_leaves_the_loss_alone_and_is_still_logged():
    tokens = batch(POLICY.log())
    algorithm = alg.Algorithm(kl=alg.KL(alg.k1, 0.5, where="reward"))
    totals = Totals.of(tokens.mask, tokens.group, 1)
    assert algorithm.loss(tokens, totals).item() == 0.0
    assert "kl" in algorithm.metrics(tokens, totals)
    assert algorithm.kl.penalty(POLICY.log(), REFERENCE.log())[0].item() == pytest.approx(0.5 * math.log(2.5))
    assert algorithm.needs.old_logp
    assert algorithm.needs.ref_logp


def report(kl=None, completions=100):
    metrics = {} if kl is None else {"kl": Mean(kl, 1.0), "num_completions": Sum(completions)}
    return StepReport(step=1, metrics=metrics)


def test_an_adaptive_coefficient_rises_above_its_target_and_falls_below():
    controller = alg.AdaptiveKL(target=0.1, start=0.2, horizon=1000)
    assert controller.update(0.2, report(0.5)) == pytest.approx(0.2 * (1 + 0.2 * 0.1))
    assert controller.update(0.2, report(0.05)) == pytest.approx(0.2 * (1 - 0.2 * 0.1))
    assert controller.update(0.2, report(0.11)) == pytest.approx(0.2 * (1 + 0.1 * 0.1))
    assert controller.update(0.2, report()) == 0.2


def test_its_memory_is_one_float_that_resolves_to_the_coefficient():
    algorithm = alg.grpo(kl=alg.KL(coefficient=alg.AdaptiveKL(target=0.1, start=0.2, horizon=1000)))
    memory = algorithm.initial_controllers()
    assert memory == {"kl.coefficient": 0.2}
    memory = algorithm.advance(memory, report(0.5))
    assert algorithm.resolve(memory).kl.coefficient == pytest.approx(0.204)
    assert algorithm.resolve({}).kl.coefficient == 0.2
