"""Objectives by hand, one token a row: what is clipped, what keeps its gradient, what is drawn."""

import math
from dataclasses import replace

import pytest
import torch

from covey import algorithms as alg
from covey.algorithms.samples import made_tokens
from covey.types import TokenBatch, Totals


def one_token(ratio, advantage, old=0.25, **more):
    """A completion of one token whose probability went from `old` to `ratio * old`."""
    logp = torch.tensor([[math.log(ratio * old)]], dtype=torch.float64, requires_grad=True)
    return TokenBatch(
        logp=logp,
        old_logp=torch.tensor([[math.log(old)]], dtype=torch.float64),
        advantages=torch.tensor([[float(advantage)]], dtype=torch.float64),
        mask=torch.ones(1, 1, dtype=torch.bool),
        group=torch.zeros(1, dtype=torch.long),
        **more,
    )


def value_and_slope(objective, tokens):
    value = objective(tokens).sum()
    return value.item(), torch.autograd.grad(value, tokens.logp)[0].item()


@pytest.mark.parametrize(
    "objective, ratio, advantage, value, slope",
    [
        (alg.Clipped(0.2, 0.28), 1.1, 2, -2.2, -2.2),
        (alg.Clipped(0.2, 0.28), 1.5, 2, -2.56, 0),
        (alg.Clipped(0.2, 0.28), 0.5, 2, -1.0, -1.0),
        (alg.Clipped(0.2, 0.28), 0.5, -2, 1.6, 0),
        (alg.Clipped(0.2, 0.28), 3.0, -2, 6.0, 6.0),
        (alg.Clipped(0.2, 0.28, delta=2.0), 3.0, -2, 4.0, 0),
        (alg.Clipped(0.2, 0.28, dual=2.5), 3.0, -2, 5.0, 0),
        (alg.CISPO(1.5), 3.0, 2, None, -3.0),
        (alg.CISPO(1.5, 0.8), 0.5, 2, None, -1.6),
        (alg.SAPO(2.0, 3.0), 1.0, 2, -2 * 2 * 0.5, -2),
        (alg.policy_gradient, 3.0, 2, None, -2),
        (alg.GMPO(0.4), 1.1, 2, -2.2, -2.2),
        (alg.GMPO(0.4), 3.0, 2, -2 * math.exp(0.4), 0),
        (alg.GMPO(0.4), 3.0, -2, 6.0, 6.0),
        (alg.DPPO(0.2, 0.2), 1.5, 2, None, -3.0),
        (alg.DPPO(0.2, 0.2), 2.0, 2, None, 0),
        (alg.DPPO(0.2, 0.2), 2.0, -2, None, 4.0),
        (alg.DPPO(0.2, 0.2), 0.1, -2, None, 0),
        (alg.DPPO(0.01, 0.01, "kl"), 2.0, 2, None, 0),
        (alg.DPPO(0.01, 0.01, "kl"), 1.1, 2, None, -2.2),
    ],
)
def test_value_and_gradient_of_one_token(objective, ratio, advantage, value, slope):
    found = value_and_slope(objective, one_token(ratio, advantage))
    assert found[1] == pytest.approx(slope, abs=1e-12)
    if value is not None:
        assert found[0] == pytest.approx(value)


def test_the_trust_region_is_measured_from_the_sampler_where_it_told():
    tokens = one_token(1.0, 2, sampler_logp=torch.tensor([[math.log(0.01)]], dtype=torch.float64))
    assert value_and_slope(alg.DPPO(0.2, 0.2), tokens)[1] == 0.0
    unknown = one_token(1.0, 2, sampler_logp=torch.full((1, 1), math.nan, dtype=torch.float64))
    assert value_and_slope(alg.DPPO(0.2, 0.2), unknown)[1] == -2.0


def test_vespo_weighs_nothing_on_policy_and_silences_sequences_far_off():
    vespo = alg.VESPO()
    assert vespo.weight(one_token(1.0, 2)).item() == 1.0
    assert vespo.weight(one_token(1e4, 2)).item() < 1e-6
    assert vespo.weight(one_token(1e-4, 2)).item() < 1e-6


@pytest.mark.parametrize("how", ["truncate", "mask"])
def test_vespo_takes_one_correction_a_sequence_as_it_takes_those_of_its_tokens(how: str):
    tokens = made_tokens(drift=0.0)
    tokens = replace(tokens, sampler_logp=tokens.old_logp - 0.01 * tokens.logp.detach())
    by_token, by_sequence = (alg.VESPO(correction=alg.Correction(level, how)) for level in ("token", "sequence"))
    assert not torch.allclose(by_token.weight(tokens), torch.ones(()).double())
    torch.testing.assert_close(by_sequence.weight(tokens), by_token.weight(tokens))


def test_gspo_by_token_equals_gspo_by_sequence():
    tokens = made_tokens(drift=0.01)
    a = alg.Clipped(3e-4, 4e-4, level="sequence")(tokens).expand_as(tokens.mask)[tokens.mask].sum()
    b = alg.GSPOToken()(tokens)[tokens.mask].sum()
    assert torch.isclose(a, b)
    slopes = [torch.autograd.grad(x, tokens.logp)[0] for x in (a, b)]
    assert torch.allclose(slopes[0] * tokens.mask, slopes[1])


def test_a_covariance_clip_drops_the_number_of_tokens_it_says():
    tokens = made_tokens()
    totals = Totals.of(tokens.mask, tokens.group, 16)
    clip = alg.ClipCov(share=0.1, lower=-100.0, upper=100.0).prepare(tokens, totals)
    dropped = clip.metrics(tokens)["clip_ratio/cov_mean"]
    assert int(dropped[tokens.mask].sum()) == int(0.1 * int(tokens.mask.sum()))
    assert not clip(tokens)[dropped].any()


def test_the_draw_of_a_covariance_clip_hangs_on_the_place_of_a_token_and_not_on_the_last_bit_of_its_number():
    tokens = made_tokens()
    tokens = replace(tokens, row=torch.arange(tokens.mask.shape[0]))
    other = replace(tokens, old_logp=tokens.old_logp + 1e-7, logp=tokens.logp + 1e-7)
    totals = Totals.of(tokens.mask, tokens.group, 16)
    clip = alg.ClipCov(share=0.1, lower=-100.0, upper=100.0)
    dropped = [clip.prepare(one, totals).metrics(one)["clip_ratio/cov_mean"] for one in (tokens, other)]
    assert dropped[0].any()
    assert torch.equal(*dropped)


def test_a_covariance_penalty_holds_the_tokens_of_largest_covariance():
    tokens = made_tokens()
    prepared = alg.KLCov(share=0.1, coefficient=0.5).prepare(tokens, Totals.of(tokens.mask, tokens.group, 16))
    held = prepared.metrics(tokens)["kl_cov/held_mean"]
    assert int(held.sum()) == max(1, int(0.1 * int(tokens.mask.sum())))
    covariance = prepared.measured.of(tokens)
    assert covariance[held].min() >= covariance[tokens.mask & ~held].max()
    extra = prepared(tokens) + tokens.advantages * tokens.ratio
    assert torch.allclose(extra[held], 0.5 * tokens.log_ratio.abs()[held])


def test_a_covariance_penalty_holds_no_more_tokens_where_they_tie():
    tokens = made_tokens()
    tied = replace(tokens, advantages=torch.zeros_like(tokens.advantages))  # every covariance is 0
    prepared = alg.KLCov(share=0.1).prepare(tied, Totals.of(tokens.mask, tokens.group, 16))
    assert int(prepared.metrics(tied)["kl_cov/held_mean"].sum()) == max(1, int(0.1 * int(tokens.mask.sum())))


def test_a_covariance_penalty_leaves_what_is_not_a_number_to_the_loss():
    tokens = made_tokens()
    tokens = replace(tokens, logp=torch.full_like(tokens.logp.detach(), math.nan))
    prepared = alg.KLCov(share=0.1).prepare(tokens, Totals.of(tokens.mask, tokens.group, 16))
    assert prepared(tokens)[tokens.mask].isnan().all()


def test_bounds_of_top_entropy_are_those_of_torch_quantile():
    tokens = made_tokens()
    for share in (0.05, 0.2, 0.5, 0.77, 1.0):
        bound = alg.TopEntropy(share).prepare(tokens, None).bound
        assert bound == pytest.approx(torch.quantile(tokens.entropy[tokens.mask].detach(), 1 - share).item())
