"""A value that a part's declaration rules out is refused when the algorithm is made, whatever the part."""

from __future__ import annotations

import math
import re

import pytest
import torch
from signal_cases import batch

from covey import algorithms as alg
from covey.errors import ConfigError
from covey.rewards import BUILTIN


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cispo, objective=CISPO(anchor='rollout')", "CISPO's anchor='rollout' must be 'old' or 'sampler'"),
        ("grpo, weight=Correction(mode='maks')", "mode='maks' must be 'truncate' or 'mask'"),
        ("grpo, objective=Clipped(level='tokens')", "level='tokens' must be"),
        ("otb, advantage=OptimalTokenBaseline(zero_tail='x')", "zero_tail='x' must be True or False"),
        ("sdpo, threshold='x'", "threshold='x' must be a number or None"),
        (
            "mopd, teacher='http://h', served_model_name='m', request_seconds='x'",
            "request_seconds='x' must be a number (above 0)",
        ),
        ("dapo, regularizer=distill(teacher='T', weight='x')", "weight='x' must be"),
        ("dapo, regularizer=distill(teacher='T', top_k=1.5)", "top_k=1.5 must be a whole number (at least 1) or None"),
        ("grpo, advantage=GroupNormalized(scale='groups')", "scale='groups' must be"),
        ("dapo, weight=VACO(high=-1)", "must be above 0"),
        ("sdpo, cap=0", "high=0 must be above 0"),
        ("grpo, objective=CISPO(high=2.0, low=3.0)", "low must be below high"),
        ("mopd, teacher='T', low=3.0, high=2.0", "low=3.0 is above its high=2.0"),
        ("grpo, reference=Every(steps=0)", "Every's steps=0 must be at least 1"),
        ("grpo, reference=Every(alpha=2.0)", "Every's alpha=2.0 must be at least 0 and at most 1"),
        ("grpo, reference=EMA(decay=2.0)", "EMA's decay=2.0 must be at least 0 and at most 1"),
        ("grpo, reference=FrozenAt(step=-1)", "FrozenAt's step=-1 must be at least 0"),
        ("grpo, reference=FrozenAt(step=1.5)", "step=1.5 must be a whole number"),
    ],
)
def test_a_value_that_a_part_does_not_take_is_named(name, said):
    with pytest.raises(ConfigError) as caught:
        alg.from_name(name)
    assert said in str(caught.value)


def test_a_rule_within_a_teacher_and_a_part_within_a_part_are_looked_at():
    with pytest.raises(ConfigError, match="FrozenAt's step=1.5"):
        alg.sdft(feedback="solution", teacher_model_kind=alg.FrozenAt(1.5))
    with pytest.raises(ConfigError, match="level='tokens'"):
        alg.grpo().replace(objective=alg.Reshaped(alg.TeacherReweighted(), alg.Clipped(level="tokens")), teacher="T")
    with pytest.raises(ConfigError, match="share=nan must be a number"):
        alg.grpo().replace(weights=(alg.TopEntropy(float("nan")),))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: alg.dapo(max_length=1024), "buffer=4096 is the last tokens before max_length=1024"),
        (lambda: alg.SoftOverlong(100, 0), "buffer=0 must be at least 1"),
        (lambda: alg.KL(alg.k1, where="reward", unbiased=True), "unbiased=True acts in the loss"),
        (lambda: alg.Clipped(dual=0.5), "dual=0.5 must be above 1"),
        (lambda: alg.sapo(negative=0.0), "negative=0.0 must be above 0"),
        (lambda: alg.TopEntropy(20), "share=20 must be at least 0 and at most 1"),
        (lambda: alg.reinforce_pp(gamma=0.9, baseline=True), "leave one out"),
    ],
)
def test_values_that_would_turn_a_part_round_or_change_nothing_are_refused(make, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: alg.sdar(weight=[0.1]), r"weight=\[0.1\] must be a number \(above 0\) or a Controller"),
        (lambda: alg.TeacherReweighted(strength=[]), r"strength=\[\] must be a number .* or a Controller"),
        (lambda: BUILTIN["rouge"](kind=True), "kind=True must be '1', '2', 'L', 1 or 2"),
    ],
)
def test_a_list_is_no_controller_and_true_is_no_1(make, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: alg.Clipped(dual=0.5), "dual=0.5 must be above 1. Below, no token of A < 0 would learn on-policy."),
        (lambda: alg.Distill(teacher="m", top_k=0), "top_k=0 must be at least 1. None takes the whole vocabulary."),
        (lambda: BUILTIN["rouge"](max_ratio=0.5), "max_ratio=0.5 must be at least 1. At 1 a text is as long as its reference."),
    ],
)  # fmt: skip
def test_a_range_says_why(make, why):
    with pytest.raises(ConfigError, match=re.escape(why)):
        make()


@pytest.mark.parametrize("make", [alg.Clipped, alg.GSPOToken, alg.GMPO, alg.DPPO, alg.ClipCov])
def test_an_infinite_clip_range_is_no_limit_below_either(make):
    """As far as 1e9 from 1 a ratio of these tokens does not go."""
    tokens = batch()
    free, wide = (make(low=low, high=low)(tokens) for low in (math.inf, 1e9))
    assert free.isfinite().all()
    assert torch.equal(free, wide)
