"""Drawing tokens from logits: the distribution, the log-probabilities and the seeds."""

import math

import pytest
import torch
from plain_sampling import transformers_scores

from covey.errors import ConfigError
from covey.rollout import SamplingParams
from covey.rollout.sampling import draw, processed, sequence_key, uniforms
from kit import rest_nightly

KINDS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "penalty": {"repetition_penalty": 1.3},
    "everything": {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
}


def seen_of(context, vocab_size):
    return torch.zeros(len(context), vocab_size, dtype=torch.bool).scatter_(1, context, True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [50, 3000])
def test_the_distribution_is_that_of_transformers_processors(kind, vocab_size):
    params = SamplingParams(**KINDS[kind])
    logits = torch.randn(6, vocab_size) * 3
    context = torch.randint(0, vocab_size, (6, 9))
    mine = processed(logits, params, seen_of(context, vocab_size))
    theirs = transformers_scores(logits.clone(), params, context)
    torch.testing.assert_close(mine.log_softmax(-1), theirs.log_softmax(-1))


def test_a_nucleus_wider_than_the_sorted_head_is_exact():
    """A nearly flat distribution over 3000 tokens: 80% of its mass needs far more than the first 512."""
    logits = torch.randn(4, 3000) * 0.01
    logits[0, 7] = 20.0  # and one row that needs a single token
    params = SamplingParams(top_p=0.8)
    theirs = transformers_scores(logits.clone(), params, None)
    torch.testing.assert_close(processed(logits, params), theirs)


def test_logits_are_left_as_they_were():
    logits = torch.randn(3, 40)
    before = logits.clone()
    draw(logits, torch.rand(3), SamplingParams())
    draw(logits, torch.rand(3), SamplingParams(temperature=0.5, top_p=0.5))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probability_is_that_of_the_processed_distribution(kind):
    params = SamplingParams(**KINDS[kind])
    logits = torch.randn(64, 700) * 2
    seen = seen_of(torch.randint(0, 700, (64, 9)), 700)
    drawn = draw(logits, torch.rand(64), params, seen=seen)
    logp = processed(logits, params, seen).double().log_softmax(-1)
    expected = logp.gather(1, drawn.tokens[:, None]).squeeze(1)
    torch.testing.assert_close(drawn.logprobs.double(), expected, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", rest_nightly(["everything", "plain", "temperature"], 1))
def test_frequencies_pass_a_chi_square_test(kind):
    params = SamplingParams(**KINDS[kind])
    logits = torch.randn(1, 300)
    draws, seen = 40_000, seen_of(torch.tensor([[1, 2, 3]]), 300)
    u = uniforms([sequence_key(3, "p", 0, 0)], draws)[0]
    tokens = draw(logits.expand(draws, -1), u, params, seen=seen.expand(draws, -1)).tokens
    p = processed(logits, params, seen).softmax(-1)[0].double()
    counts = tokens.bincount(minlength=300).double()
    assert counts[p == 0].sum() == 0
    common = p * draws > 5
    statistic = ((counts - p * draws).square() / (p * draws))[common].sum()
    degrees = int(common.sum()) - 1
    assert statistic < degrees + 4.5 * math.sqrt(2 * degrees)  # about one in 10^5 by chance


def test_every_uniform_gives_the_token_of_the_cumulative_distribution():
    logits = torch.randn(1, 600).double().float()
    u = torch.linspace(0, 1, 5000, dtype=torch.float64)[:-1]
    tokens = draw(logits.expand(len(u), -1), u, SamplingParams()).tokens
    cumulative = logits.double().softmax(-1)[0].cumsum(0)
    expected = torch.searchsorted(cumulative, u, right=True)
    near = (cumulative[:, None] - u).abs().min(0).values < 1e-6
    assert torch.equal(tokens[~near], expected[~near])


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_give_tokens_that_can_be_drawn(u):
    logits = torch.full((2, 1000), -math.inf)
    logits[0, 300] = logits[0, 301] = 0.0
    logits[1, 999] = 0.0
    tokens = draw(logits, torch.full((2,), u, dtype=torch.float64), SamplingParams()).tokens
    assert tokens.tolist() == [300 if u == 0 else 301, 999]


def test_greedy_takes_the_likeliest_token_and_tells_its_probability_at_temperature_one():
    logits = torch.tensor([[0.0, math.log(3.0), 0.0]])
    drawn = draw(logits, torch.rand(1), SamplingParams(temperature=0))
    assert drawn.tokens.tolist() == [1]
    assert drawn.logprobs.item() == pytest.approx(math.log(0.6))


def test_uniforms_are_the_published_splitmix64_numbers():
    """The first outputs of the reference implementation for state 1234567 (Vigna, splitmix64.c; Rosetta Code)."""
    words = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    expected = torch.tensor([[(word >> 11) * 2.0**-53 for word in words]], dtype=torch.float64)
    assert torch.equal(uniforms([1234567], 4), expected)


def test_a_uniform_depends_on_its_completion_and_position_only():
    keys = [sequence_key(1, f"0:{i}", 0, i) for i in range(5)]
    everything = uniforms(keys, 20)
    assert torch.equal(uniforms(keys[3:4], 11)[0], everything[3, :11])
    assert torch.equal(uniforms(list(reversed(keys)), 20), everything.flip(0))


def test_keys_differ_in_each_of_their_parts():
    keys = {sequence_key(s, u, o, g) for s in (0, 1) for u in ("0:1", "0:11", "") for o in (0, 1) for g in range(20)}
    assert len(keys) == 2 * 3 * 2 * 20


def test_a_penalty_without_the_tokens_seen_is_refused():
    with pytest.raises(ValueError, match="seen"):
        processed(torch.zeros(1, 3), SamplingParams(repetition_penalty=1.1))


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": 1e-40}, "temperature is 1e-40; give 0 for greedy decoding or a number from 0.0001 to 10000"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": 1e39}, "repetition_penalty is 1e\\+39"),
        ({"stop": ("",)}, "empty string"),
    ],
)
def test_wrong_sampling_options_are_refused_in_a_sentence(wrong, said):
    with pytest.raises(ConfigError, match=said):
        SamplingParams(**wrong)


def test_one_stop_string_or_a_list_of_them():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_greedy", [False, True])
def test_drawing_in_place_draws_the_same_and_otherwise_logits_are_left_as_they_were(kind, is_greedy):
    params = SamplingParams(**(KINDS[kind] | ({"temperature": 0.0} if is_greedy else {})))
    logits, points = torch.randn(6, 300) * 3, torch.rand(6, dtype=torch.float64)
    seen = seen_of(torch.randint(0, 300, (6, 9)), 300)
    given = logits.clone()
    kept = draw(given, points, params, seen=seen)
    assert torch.equal(given, logits)
    overwritten = draw(given, points, params, seen=seen, in_place=True)
    assert torch.equal(kept.tokens, overwritten.tokens)
    assert torch.equal(kept.logprobs, overwritten.logprobs)
