"""Answers of an environment are prefilled into their rows: the completions of token by token, with a plain forward's log-probabilities."""

import functools
from itertools import product

import native_models
import pytest
import torch
import windowed_models
from causal_classes import WITH_STATES, build
from plain_sampling import collect, ids_of
from static_runs import record, sampler_of

from covey.rollout import NativeSampler, SamplingParams
from covey.rollout import answers as module
from covey.rollout.agreement import plain_logprobs
from covey.rollout.answers import fewest_tokens, takes_answers
from covey.rollout.cuda_graphs import Captured
from kit import rest_nightly, tiny_tokenizer

ENDS = list(range(3, 40))
"""End-of-text ids: turns are 1 to 20 tokens long."""
PROMPTS = [list(range(5, 5 + length)) for length in (3, 1, 40, 7)]
BY_TOKEN = 10**9
BEGIN_ANEW = ("recurrent_gemma", "mamba", "jamba", "falcon_mamba", "zamba")
"""Kinds whose layers drop their state when they get several tokens."""


def environment(turns):
    """Answers of 1 to 45 tokens: two rows of a group hardly ever get one of the same length at the same time."""
    answer = lambda turn: [50 + i % 200 for i in range(1 + (7 * len(turn.token_ids) + 16 * turn.sample) % 45)]
    return [answer(turn) if len(turn.token_ids) < 50 else None for turn in turns]


def both(make, params, prompts=PROMPTS, n=2):
    """Groups of `make()` with answers prefilled, and fed token by token."""
    groups = []
    for fewest in (2, BY_TOKEN):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "fewest_tokens", lambda forward, rows, fewest=fewest: fewest)
            groups.append(collect(make(), prompts, n, params))
    return groups


def expect_equal(groups, by_token, tolerance=1e-5):
    assert ids_of(groups) == ids_of(by_token)
    pairs = [
        pair for a, b in zip(groups, by_token, strict=True) for pair in zip(a.completions, b.completions, strict=True)
    ]
    assert any(not one.mask.all() for one, _ in pairs)
    for one, other in pairs:
        assert torch.equal(one.mask, other.mask)
        assert one.finish == other.finish
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=tolerance, rtol=0)


def gap_of(model, groups):
    """Largest difference from a plain forward of a token's log-probability that the model wrote."""
    rest = iter(plain_logprobs(model, groups))
    gaps = [(one.logprobs - next(rest))[one.written].abs().max() for group in groups for one in group.completions]
    return float(max(gaps))


def make_of(model, **options):
    options = {"eos_ids": ENDS, "dtype": "float32", "environment": environment, "max_rows": 5, **options}
    return lambda: NativeSampler(model, tiny_tokenizer(), **options)


@pytest.mark.parametrize(
    "arch, attention",
    rest_nightly(product(native_models.NATIVE, ("auto", "torch")), [("qwen2", "auto")]),
)
def test_completions_are_those_of_token_by_token(arch, attention):
    model, params = native_models.build(*native_models.NATIVE[arch]), SamplingParams(max_tokens=90, seed=2)
    groups, by_token = both(make_of(model, attention=attention), params)
    expect_equal(groups, by_token)
    assert gap_of(model, groups) <= 1e-5


@pytest.mark.nightly  # in CI `test_replies_of_an_environment_enter_the_state_of_their_row`
@pytest.mark.parametrize("kind", WITH_STATES)
def test_a_row_with_a_state_goes_on_from_it(kind):
    model, params = build(kind), SamplingParams(max_tokens=60, seed=2)
    groups, by_token = both(make_of(model), params)
    expect_equal(groups, by_token)
    assert gap_of(model, groups) <= 1e-5
    assert takes_answers(make_of(model)().forward) is (kind not in BEGIN_ANEW)


@pytest.mark.nightly
@pytest.mark.parametrize("arch", rest_nightly(list(windowed_models.LOCAL), 1))
def test_rows_of_a_prompt_have_windows_of_their_own(arch):
    model, params = windowed_models.build(arch), SamplingParams(max_tokens=80, seed=2)
    groups, by_token = both(make_of(model), params, windowed_models.PROMPTS[1:4])
    expect_equal(groups, by_token, 1e-4)  # of weights as wide as these, whose log-probabilities reach -10
    assert gap_of(model, groups) <= 1e-4


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["qwen2", "mistral", "qwen3_5_text"])
def test_answers_enter_between_captured_steps(kind):
    model = {
        "qwen2": lambda: native_models.build("Qwen2", {}),
        "mistral": lambda: windowed_models.build("mistral"),
        "qwen3_5_text": lambda: build("qwen3_5_text"),
    }[kind]()
    params = SamplingParams(max_tokens=90, seed=2)
    expected = collect(make_of(model)(), PROMPTS, 2, params)
    options = {"eos_ids": ENDS, "environment": environment, "max_rows": 5}
    for steps in (None, Captured(record)):
        make = functools.partial(sampler_of, model, tiny_tokenizer(), steps, **options)
        groups, by_token = both(make, params)
        expect_equal(groups, by_token, 1e-4 if kind == "mistral" else 1e-5)
        expect_equal(groups, expected, 1e-4 if kind == "mistral" else 1e-5)


def test_penalties_and_stop_strings_see_the_answers():
    model = native_models.build("Qwen2", {})
    params = SamplingParams(max_tokens=90, seed=2, repetition_penalty=1.3, stop=("e",))
    groups, by_token = both(make_of(model), params)
    expect_equal(groups, by_token)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("qwen3_5_moe_text", marks=pytest.mark.nightly)])
def test_experts_of_answers_are_recorded(kind):
    model = native_models.build("Qwen3Moe", native_models.EXPERTS) if kind == "qwen3_moe" else build(kind)
    groups, by_token = both(make_of(model, records_experts=True), SamplingParams(max_tokens=80, seed=2))
    expect_equal(groups, by_token)
    for group, other in zip(groups, by_token, strict=True):
        for one, two in zip(group.completions, other.completions, strict=True):
            assert torch.equal(one.experts, two.experts)


def test_an_answer_takes_no_decode_steps():
    model, steps = native_models.build("Qwen2", {}), []
    answer = lambda turns: [[60] * 50 if len(turn.token_ids) < 40 else None for turn in turns]
    sampler = make_of(model, environment=answer, check_stop=lambda: steps.append(1))()
    groups = list(sampler.sample(PROMPTS[:1], 2, SamplingParams(max_tokens=200, seed=2)))
    written = [int(one.written.sum()) for group in groups for one in group.completions]
    assert all(int((~one.written).sum()) >= 50 for one in groups[0].completions)
    assert len(steps) == max(written)


def test_an_answer_that_does_not_fit_is_cut():
    model = native_models.build("Qwen2", {})
    sampler = make_of(model, environment=lambda turns: [[60] * 500 for _ in turns])()
    for group in sampler.sample(PROMPTS[:3], 3, SamplingParams(max_tokens=40, seed=2)):
        for one in group.completions:
            assert one.finish == "length"
            assert one.num_tokens == 40
            assert one.token_ids[~one.mask].tolist() == [60] * int((~one.mask).sum())


def test_a_short_answer_rides_along_in_the_steps_of_many_rows():
    dense, hybrid = (make_of(model)().forward for model in (native_models.build("Qwen2", {}), build("qwen3_5_text")))
    assert [fewest_tokens(dense, rows) for rows in (1, 4, 16, 32, 256)] == [8, 8, 32, 64, 64]
    assert fewest_tokens(hybrid, 1) == 64
