"""Completions that pause for an environment's answer and go on."""

import pytest
import torch
from plain_sampling import TEXTS, collect, favour, ids_of, plain_logprobs, talkative

from covey.errors import DataError
from covey.rollout import NativeSampler, SamplingParams
from kit import tiny_model, tiny_tokenizer


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


def test_an_answer_enters_the_context_unmasked_by_the_model(tokenizer):
    answer = tokenizer("= 42")["input_ids"]
    turns = []

    def environment(asked):
        turns.extend(asked)
        return [answer if len(turn.token_ids) < 30 else None for turn in asked]

    model = talkative()
    params = SamplingParams(max_tokens=60, seed=3)
    sampler = NativeSampler(model, tokenizer, environment=environment)
    groups = collect(sampler, TEXTS[:2], 4, params)
    assert any((~completion.mask).sum() > len(answer) for group in groups for completion in group.completions)
    for group in groups:
        for completion, expected in zip(group.completions, plain_logprobs(model, group, params), strict=True):
            outside = completion.token_ids[~completion.mask]
            assert outside.tolist() == answer * (len(outside) // len(answer))
            assert completion.logprobs[~completion.mask].abs().sum() == 0
            own = completion.mask
            torch.testing.assert_close(completion.logprobs[own], expected[own], atol=1e-4, rtol=0)
            assert not torch.equal(completion.mask, torch.ones_like(completion.mask))
    first = turns[0]
    assert first.text == tokenizer.decode(first.token_ids, skip_special_tokens=True)


def test_the_same_tokens_follow_whatever_the_schedule(tokenizer):
    def environment(asked):
        return [" ok " if len(turn.token_ids) + turn.sample < 25 else None for turn in asked]

    params = SamplingParams(max_tokens=50, seed=3, repetition_penalty=1.1)
    model = talkative()
    together = collect(NativeSampler(model, tokenizer, environment=environment), TEXTS, 3, params)
    waves = collect(NativeSampler(model, tokenizer, environment=environment, max_rows=3), TEXTS, 3, params)
    assert ids_of(together) == ids_of(waves)


def test_text_since_the_last_answer_is_what_a_turn_shows(tokenizer):
    x = tokenizer("x")["input_ids"][0]
    model = favour(tiny_model(), [x, tokenizer.eos_token_id])
    texts = []

    def environment(asked):
        texts.extend(turn.text for turn in asked)
        return ["yyy" if len(texts) < 3 else None for turn in asked]

    (group,) = NativeSampler(model, tokenizer, environment=environment).sample(["a"], 1, SamplingParams(seed=1))
    assert len(texts) == 3
    assert all(set(text) <= {"x"} for text in texts)
    assert group.completions[0].text.count("yyy") == 2
    assert group.completions[0].finish == "stop"


def test_an_answer_beyond_the_limit_is_cut_with_the_completion(tokenizer):
    model = favour(tiny_model(), [tokenizer.eos_token_id])
    sampler = NativeSampler(model, tokenizer, environment=lambda turns: [[7] * 100 for _ in turns])
    (group,) = sampler.sample(["a"], 2, SamplingParams(max_tokens=10))
    for completion in group.completions:
        assert completion.token_ids.tolist() == [tokenizer.eos_token_id] + [7] * 9
        assert completion.finish == "length"
        assert completion.mask.tolist() == [True] + [False] * 9


def test_a_stop_string_of_an_earlier_turn_does_not_end_the_next(tokenizer):
    model = favour(tiny_model(), [tokenizer(c)["input_ids"][0] for c in "xy"])
    replied = []

    def environment(asked):
        replied.append(len(asked))
        return ["z" if len(replied) < 4 else None for _ in asked]

    params = SamplingParams(max_tokens=60, seed=0, stop=("xy",))
    (group,) = NativeSampler(model, tokenizer, environment=environment).sample(["a"], 1, params)
    assert group.completions[0].text.count("xy") == 4
    assert group.completions[0].text.count("xyz") == 3


def test_one_reply_for_each_turn_or_a_sentence(tokenizer):
    model = favour(tiny_model(), [tokenizer.eos_token_id])
    sampler = NativeSampler(model, tokenizer, environment=lambda turns: [])
    with pytest.raises(DataError, match="0 replies to 2 turns"):
        list(sampler.sample(["a"], 2, SamplingParams(max_tokens=4)))


def test_a_stop_string_does_not_begin_in_an_answer(tokenizer):
    """As where every turn is a prompt of its own, of a server or of plain transformers."""
    x, y, z = (tokenizer(letter)["input_ids"][0] for letter in "xyz")
    sampler = NativeSampler(
        favour(tiny_model(), [x, z]),
        tokenizer,
        eos_ids=[z],
        environment=lambda turns: [None if y in turn.token_ids else [y] for turn in turns],
    )
    (group,) = sampler.sample(["a"], 20, SamplingParams(max_tokens=40, seed=0, stop=("yx",)))
    assert any("yx" in completion.text for completion in group.completions)
    for completion in group.completions:
        assert int(completion.token_ids[-1]) == z


def test_an_environment_that_raises_ends_the_call_and_leaves_no_trace(tokenizer):
    model, params, calls = talkative().train(), SamplingParams(max_tokens=40, seed=3), []

    def environment(asked):
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError
        return [" ok " if len(turn.token_ids) + turn.sample < 25 else None for turn in asked]

    sampler = NativeSampler(model, tokenizer, environment=environment)
    with pytest.raises(ZeroDivisionError):
        list(sampler.sample(TEXTS[:2], 2, params))
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    again, fresh = sampler, NativeSampler(talkative(), tokenizer, environment=environment)
    assert ids_of(collect(again, TEXTS[:2], 2, params)) == ids_of(collect(fresh, TEXTS[:2], 2, params))
