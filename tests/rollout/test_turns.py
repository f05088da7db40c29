"""Completions of several turns over samplers of single ones: as the native engine writes them within its decode steps."""

import pytest
import torch
from plain_sampling import TEXTS, favour, plain_logprobs, talkative

from covey.errors import DataError
from covey.rollout import SamplingParams, choose_sampler
from covey.rollout.environments import Turn
from covey.types import Prompt
from kit import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*plain transformers:UserWarning")


def prompts(count: int = 2) -> list[Prompt]:
    tokenizer = tiny_tokenizer()
    return [Prompt(uid=str(i), token_ids=tuple(tokenizer(text)["input_ids"])) for i, text in enumerate(TEXTS[:count])]


def drawn(backend, model, environment, params, n=3):
    more = {"generate": {}} if backend == "generate" else {}
    sampler = choose_sampler(model, tiny_tokenizer(), backend=backend, environment=environment, **more)
    return sorted(sampler.sample(prompts(), n, params), key=lambda group: group.prompt.uid)


@pytest.mark.parametrize("backend", ["transformers", "generate"])
def test_greedy_turns_are_those_of_the_native_engine(backend):
    answer = tiny_tokenizer()("= 42")["input_ids"]
    seen: dict[str, list[Turn]] = {}

    def environment_of(name):
        def environment(turns):
            seen.setdefault(name, []).extend(turns)
            return [answer if len(turn.token_ids) + turn.sample < 25 else None for turn in turns]

        return environment

    params, model = SamplingParams(max_tokens=40, temperature=0.0), talkative()
    mine = drawn("native", model, environment_of("native"), params)
    other = drawn(backend, model, environment_of(backend), params)
    for one, its in zip(mine, other, strict=True):
        for a, b in zip(one.completions, its.completions, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert a.mask.tolist() == b.mask.tolist()
            assert (a.text, a.finish, a.version, a.versions) == (b.text, b.finish, b.version, b.versions)
            if b.logprobs is not None:
                torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-4, rtol=0)
    shown = lambda name: sorted((turn.prompt.uid, turn.sample, turn.token_ids, turn.text) for turn in seen[name])
    assert shown("native") == shown(backend)
    assert any((~c.mask).any() for group in mine for c in group.completions)


def test_log_probabilities_are_those_of_a_plain_forward_and_draws_repeat():
    environment = lambda turns: [" ok " if len(turn.token_ids) < 25 else None for turn in turns]
    params, model = SamplingParams(max_tokens=50, seed=3), talkative()
    groups, again = (drawn("transformers", model, environment, params) for _ in range(2))
    for group, other in zip(groups, again, strict=True):
        for one, its, expected in zip(
            group.completions, other.completions, plain_logprobs(model, group, params), strict=True
        ):
            assert one.token_ids.tolist() == its.token_ids.tolist()
            torch.testing.assert_close(one.logprobs[one.mask], expected[one.mask], atol=1e-4, rtol=0)


def test_limits_cut_a_reply_and_a_turn():
    model = favour(tiny_model(), [tiny_tokenizer().eos_token_id])
    (group, _) = drawn("transformers", model, lambda turns: [[7] * 100 for _ in turns], SamplingParams(max_tokens=10))
    for one in group.completions:
        assert one.token_ids.tolist() == [tiny_tokenizer().eos_token_id] + [7] * 9
        assert (one.finish, one.mask.tolist()) == ("length", [True] + [False] * 9)
    uneven = lambda turns: [[7] * (turn.sample + 1) if len(turn.token_ids) == 1 else None for turn in turns]
    (group, _) = drawn("transformers", talkative(), uneven, SamplingParams(max_tokens=12, seed=1))
    assert all(one.num_tokens <= 12 for one in group.completions)


def test_one_reply_for_each_turn_or_a_sentence():
    model = favour(tiny_model(), [tiny_tokenizer().eos_token_id])
    with pytest.raises(DataError, match="0 replies to 3 turns"):
        drawn("transformers", model, lambda turns: [], SamplingParams(max_tokens=4))
