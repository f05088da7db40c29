"""Calls of an unmodified agent become episodes that are exact to the token: turns, retries, branches and changed histories."""

import json
from dataclasses import replace

import pytest
import torch

from covey.rollout import NativeSampler, SamplingParams
from covey.serving import Call, Endpoint, Trace, episodes_of, lines_of, read_traces
from covey.types import Completion, Group, Prompt
from environments.acting import chat_tokenizer, tiny_llama
from serving.clients import Words, client


@pytest.fixture(scope="module")
def sampler():
    tokenizer = chat_tokenizer()
    return NativeSampler(tiny_llama(tokenizer).eval(), tokenizer, dtype="float32", max_rows=16)


class Agent:
    """A loop over chat completions, as somebody would write it who has never heard of Covey."""

    def __init__(self, ask, session):
        self.ask, self.headers, self.messages = ask, {"X-Session-Id": session}, []

    def say(self, text, keep=True, **how):
        asked = [*self.messages, {"role": "user", "content": text}]
        how = {"max_tokens": 12, "seed": 1, "temperature": 1.0, **how}
        reply = self.ask.chat.completions.create(model="policy", messages=asked, extra_headers=self.headers, **how)
        if keep:
            self.messages = [*asked, {"role": "assistant", "content": reply.choices[0].message.content}]
        return reply


def recorded(sampler, act):
    """What `act` does with a client, as episodes, and the calls themselves."""
    calls = []
    with Endpoint(sampler, on_call=calls.append) as endpoint, client(endpoint.url) as ask:
        act(ask)
    return episodes_of(calls), calls


def check(episode):
    """Masks, log-probabilities and ids are of one length; nothing outside of the mask has a log-probability."""
    one: Completion = episode.completion
    assert len(one.token_ids) == len(one.mask) == len(one.logprobs)


def test_a_conversation_of_several_turns_is_one_episode_with_the_tokens_that_were_drawn(sampler):
    def act(ask):
        agent = Agent(ask, "a")
        for text in ("one", "two", "three"):
            agent.say(text)

    with Words(sampler, "yes<|im_end|>", "no<|im_end|>", "so<|im_end|>"):
        found, calls = recorded(sampler, act)
    (episode,) = found.episodes
    check(episode)
    assert found.num_breaks == 0
    assert episode.call_ids == tuple(call.id for call in calls)
    assert episode.prompt.token_ids == calls[0].group.prompt.token_ids
    last = calls[-1].group
    whole = [*last.prompt.token_ids, *last.completions[0].token_ids.tolist()]
    assert [*episode.prompt.token_ids, *episode.completion.token_ids.tolist()] == whole
    written = [token for call in calls for token in call.group.completions[0].token_ids.tolist()]
    assert episode.completion.token_ids[episode.completion.mask].tolist() == written
    drawn = torch.cat([call.group.completions[0].logprobs for call in calls])
    assert torch.equal(episode.completion.logprobs[episode.completion.mask], drawn)
    roles = [message["role"] for message in episode.completion.messages]
    assert roles == ["assistant", "user", "assistant", "user", "assistant"]
    ((versioned,),) = [episodes_of([by_version(call, 3 + i) for i, call in enumerate(calls)]).episodes]
    versions = [3 + i for i, call in enumerate(calls) for _ in call.group.completions[0].token_ids[:-1]]
    is_first = torch.cat([torch.arange(call.group.completions[0].num_tokens) < 1 for call in calls])
    spans = versioned.completion.token_versions[versioned.completion.mask]
    assert spans[~is_first].tolist() == [version + (version == 3) for version in versions]
    assert spans[is_first].tolist() == [3, 4, 5]


def by_version(call, version):
    """The call as if weights of this version had begun its answer, and the first call's had changed to 4 after a token."""
    changed = {"version": version, "versions": ((1, 4),) if version == 3 else ()}
    return replace(call, group=replace(call.group, completions=(replace(call.group.completions[0], **changed),)))


def test_a_retry_is_a_branch_and_a_shared_turn_is_trained_on_once(sampler):
    def act(ask):
        agent = Agent(ask, "a")
        agent.say("one")
        agent.say("two", keep=False)
        agent.say("two", seed=2)

    with Words(sampler, "yes<|im_end|>", "no<|im_end|>", "so<|im_end|>"):
        found, calls = recorded(sampler, act)
    first, second = found.episodes
    check(first)
    check(second)
    assert (first.call_ids, second.call_ids) == ((calls[0].id, calls[1].id), (calls[0].id, calls[2].id))
    sizes = [call.group.completions[0].num_tokens for call in calls]
    assert int(first.completion.mask.sum()) == sizes[0] + sizes[1]
    assert int(second.completion.mask.sum()) == sizes[2]


class Compared(tuple):
    """Token ids that count how often their beginning is compared with an earlier call's."""

    count = 0

    def __getitem__(self, key):
        Compared.count += isinstance(key, slice) and key.start is None
        return super().__getitem__(key)


def test_a_turn_is_compared_with_the_turn_before_it_and_not_with_every_earlier_one():
    calls, ids = [], (1,)
    for turn in range(40):
        completion = Completion(token_ids=torch.tensor([2, 3]), text="", finish="stop", logprobs=torch.zeros(2))
        group = Group(prompt=Prompt(uid="0", token_ids=Compared(ids), messages=()), completions=(completion,))
        params = SamplingParams(max_tokens=2)
        fields = {"model": "policy", "params": params, "seed": 0, "session": None, "user": None, "seconds": 0.0}
        calls.append(Call(id=f"{turn:02d}", group=group, created=float(turn), **fields))
        ids = (*ids, 2, 3, 4)
    (episode,) = episodes_of(calls).episodes
    assert len(episode.call_ids) == 40
    assert Compared.count == 39


def test_sessions_and_several_answers_stay_apart(sampler):
    def act(ask):
        Agent(ask, "a").say("one", n=3)
        Agent(ask, "b").say("one")

    found, calls = recorded(sampler, act)
    assert [episode.session for episode in found.episodes] == ["a", "a", "a", "b"]
    assert found.num_breaks == 0
    for episode, completion in zip(found.episodes, calls[0].group.completions, strict=False):
        assert torch.equal(episode.completion.token_ids, completion.token_ids)
        assert bool(episode.completion.mask.all())


def test_a_changed_history_is_a_break_and_never_joined(sampler):
    def act(ask):
        agent = Agent(ask, "a")
        agent.say("one")
        agent.messages[-1] = {"role": "assistant", "content": "what the model never said"}
        agent.say("two")

    found, calls = recorded(sampler, act)
    assert found.num_breaks == 1
    assert [episode.call_ids for episode in found.episodes] == [(call.id,) for call in calls]


def test_a_turn_without_log_probabilities_is_no_certain_one(sampler):
    """0 would be the log-probability of a token that had to come, and the learner would correct for it."""

    def act(ask):
        agent = Agent(ask, "a")
        agent.say("one")
        agent.say("two")

    with Words(sampler, "yes<|im_end|>", "no<|im_end|>"):
        _, (first, second) = recorded(sampler, act)
    bare = tuple(replace(done, logprobs=None) for done in second.group.completions)
    [episode] = episodes_of([first, replace(second, group=replace(second.group, completions=bare))]).episodes
    drawn, written = episode.completion.logprobs, len(bare[0].token_ids)
    assert drawn[-written:].isnan().all()
    assert not drawn[:-written].isnan().any()


@pytest.mark.parametrize("logprob", [torch.nan, -torch.inf, torch.inf])
def test_a_trace_holds_any_text_and_log_probabilities_that_are_no_numbers_of_json(sampler, tmp_path, logprob):
    odd = "one\u2028two\x85three\x0bfour"
    _, (call,) = recorded(sampler, lambda ask: Agent(ask, "a").say(odd))
    (done,) = call.group.completions
    unreported = replace(done, logprobs=torch.full_like(done.logprobs, logprob))
    call = replace(call, group=replace(call.group, completions=(unreported,)))
    path = tmp_path / "traces.jsonl"
    (line,) = lines_of([Trace("a", "agent", "0:0", (call,), 0.0, 1.0)])
    json.loads(line, parse_constant=pytest.fail)
    path.write_text(line + "\n", encoding="utf-8")
    (again,) = read_traces(path)
    assert again.group.prompt.messages[-1]["content"] == odd
    torch.testing.assert_close(again.group.completions[0].logprobs, unreported.logprobs, equal_nan=True)


def test_an_episode_may_have_more_calls_than_python_nests_functions():
    ids, calls, done = (
        [1],
        [],
        Completion(token_ids=torch.tensor([5]), text="x", finish="stop", logprobs=torch.zeros(1)),
    )
    for number in range(1100):
        group = Group(prompt=Prompt(uid="0", token_ids=tuple(ids)), completions=(done,))
        how = {"model": "policy", "params": SamplingParams(), "seed": 0, "session": "a", "user": None, "seconds": 0.0}
        calls.append(Call(id=str(number), group=group, created=float(number), **how))
        ids += [5, 7]
    (episode,) = episodes_of(calls).episodes
    assert int(episode.completion.mask.sum()) == len(episode.call_ids) == 1100
