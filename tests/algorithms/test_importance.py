"""Weights between sampler and learner by hand, and what they leave alone."""

import math
from dataclasses import replace

import pytest
import torch

from covey import algorithms as alg
from covey.algorithms.importance import mismatch
from covey.types import TokenBatch, Totals
from covey.types.metrics import EffectiveSize


def tokens_of(gaps, mask=None, advantage=1.0, drift=0.0):
    """Rows of tokens whose learner log-probability is `gap` above the sampler's; None: the sampler did not tell."""
    known = torch.tensor([[0.0 if gap is None else gap for gap in row] for row in gaps], dtype=torch.float64)
    told = torch.tensor([[gap is not None for gap in row] for row in gaps])
    old = torch.full_like(known, -2.0)
    return TokenBatch(
        logp=old + drift,
        old_logp=old,
        advantages=torch.full((len(gaps), 1), advantage, dtype=torch.float64),
        mask=torch.ones_like(told) if mask is None else torch.tensor(mask),
        group=torch.zeros(len(gaps), dtype=torch.long),
        sampler_logp=torch.where(told, old - known, math.nan),
    )


def test_a_token_the_sampler_did_not_tell_counts_as_equal():
    assert mismatch(tokens_of([[0.5, None]])).tolist() == [[0.5, 0.0]]


def test_token_weights_are_truncated_into_their_bounds_or_masked_outside():
    tokens = tokens_of([[math.log(2), math.log(0.5), 0.0]])
    assert alg.Correction("token", "truncate", 1.5, 0.8)(tokens).tolist() == [[1.5, 0.8, 1.0]]
    assert alg.Correction("token", "mask", 1.5, 0.8)(tokens).tolist() == [[0.0, 0.0, 1.0]]


def test_sequence_weights_are_products_over_tokens_that_count():
    tokens = tokens_of([[math.log(2), math.log(2), 5.0]], [[True, True, False]])
    assert alg.Correction("sequence", "truncate", 9.0)(tokens).item() == pytest.approx(4.0)
    assert alg.Correction("sequence", "mask", 3.0)(tokens).item() == 0.0
    assert alg.Correction("sequence", "mask", None)(tokens).item() == pytest.approx(4.0)


def test_normalized_weights_have_mean_one_over_the_step():
    tokens = tokens_of([[0.3, -0.2], [0.1, 0.4]])
    weights = alg.Correction("token", "truncate", 9.0, normalize=True)(tokens)
    assert weights.mean().item() == pytest.approx(1.0)


def test_without_the_samplers_numbers_nothing_is_corrected():
    tokens = tokens_of([[0.3, -0.2]])
    plain = TokenBatch(**{name: x for name, x in tokens.tensors().items() if name != "sampler_logp"})
    assert alg.Correction()(plain).tolist() == [[1.0]]
    assert alg.Correction().metrics(plain) == {}


def test_the_metrics_have_trls_names():
    metrics = alg.Correction("token", "truncate", 1.5)(tokens_of([[math.log(2), 0.0]]))
    assert metrics.tolist() == [[1.5, 1.0]]
    found = alg.Correction("token", "truncate", 1.5).metrics(tokens_of([[math.log(2), 0.0]]))
    name = "sampling/importance_sampling_ratio"
    assert {key: metric.value for key, metric in found.items()} == {
        f"{name}/min": 1.0,
        f"{name}/mean": 1.25,
        f"{name}/max": 1.5,
    }


@pytest.mark.parametrize(
    "statistic, high, low, kept",
    [
        ("token_k1", 1.5, None, [True, False, True]),  # -e = -ln 2 lies outside of [-ln 1.5, ln 1.5]
        ("token_k1", 1.5, 0.4, [True, True, True]),
        ("token_k2", 0.2, None, [True, False, True]),
        ("token_k3", 0.31, None, [True, True, True]),
        ("seq_sum_k1", 1.5, None, [False, False, False]),
        ("seq_mean_k1", 1.5, None, [True, True, True]),
        ("seq_max_k3", 0.2, None, [False, False, False]),
    ],
)
def test_rejection_by_tokens_or_whole_sequences(statistic, high, low, kept):
    tokens = tokens_of([[0.0, math.log(2), 0.0]])
    assert alg.Rejection(statistic, high, low).keep(tokens).tolist() == [kept]


def test_drifted_sequences_of_negative_advantage_are_left_out():
    drifted, close_by = (
        tokens_of([[0.0, 0.0]], advantage=-1.0, drift=-0.6),
        tokens_of([[0.0, 0.0]], advantage=-1.0, drift=-0.4),
    )
    good = tokens_of([[0.0, 0.0]], advantage=1.0, drift=-0.6)
    mask = alg.OffPolicyMask(0.5)
    assert [mask(tokens).item() for tokens in (drifted, close_by, good)] == [0.0, 1.0, 1.0]


def test_denominators_do_not_change_with_a_mask():
    tokens = tokens_of([[math.log(9)], [0.0]])
    totals = Totals.of(tokens.mask, tokens.group, 1)
    algorithm = alg.Algorithm(weights=alg.Correction("token", "mask", 3.0))
    assert algorithm.loss(tokens, totals).item() == pytest.approx(-0.5)


def test_the_effective_sample_size_is_one_for_equal_weights_and_less_otherwise():
    assert EffectiveSize.of(torch.full((1, 4), 3.0)).value == pytest.approx(1.0)
    assert EffectiveSize.of(torch.tensor([[1.0, 0.0, 0.0, 0.0]])).value == pytest.approx(0.25)


def test_approx_kl_is_to_the_policy_that_drew_the_tokens():
    drawn, logp = torch.tensor([[-1.0, -2.0, math.nan]]), torch.tensor([[-1.5, -2.0, -3.0]])
    tokens = TokenBatch(
        logp=logp, old_logp=logp, advantages=torch.ones(1, 1), mask=torch.ones(1, 3, dtype=torch.bool),
        group=torch.zeros(1, dtype=torch.int64), sampler_logp=drawn,
    )  # fmt: skip
    measured = lambda tokens: alg.dapo().metrics(tokens, Totals.of(tokens.mask, tokens.group, 8))["approx_kl"].value
    assert measured(tokens) == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 3)
    assert measured(replace(tokens, same_weights=torch.ones(1, dtype=torch.bool))) == 0.0  # by rounding alone
    assert measured(replace(tokens, old_logp=logp + 0.5, sampler_logp=None)) > 0.0
