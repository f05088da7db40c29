"""Thoughts that are still open after their budget are closed for the model, in every sampler at the same token."""

from dataclasses import replace

import pytest
import torch
from plain_sampling import favour, plain_logprobs

from covey.algorithms import GiGPO
from covey.data.thoughts import ThoughtMarks
from covey.errors import ConfigError
from covey.rollout import SamplingParams, choose_sampler
from covey.rollout.thinking import ThinkingBudget
from covey.types import EpisodeNotes, Prompt, Scores
from kit import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*plain transformers:UserWarning")
BUDGET = 12
CLOSING = "\n</think>\n\n"


def ids(text):
    return tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]


def prompts(*texts):
    return [Prompt(uid=str(i), token_ids=tuple(ids(text))) for i, text in enumerate(texts)]


def rambling(eos_bias=2.0, seed=0):
    """A model that writes any letters, and ends now and then."""
    model = favour(tiny_model(layers=2, seed=seed), range(320), bias=0.0)
    model.lm_head.bias.data[tiny_tokenizer().eos_token_id] = eos_bias
    return model


def drawn(backend, model, texts, params, n=4, environment=None, budget=BUDGET, **more):
    more = {**({"generate": {}} if backend == "generate" else {}), **more}
    more |= {"attention": "torch"} if backend == "native" else {}
    sampler = choose_sampler(
        model, tiny_tokenizer(), backend=backend, thinking_tokens=budget, environment=environment, **more
    )
    return sorted(sampler.sample(prompts(*texts), n, params), key=lambda group: group.prompt.uid)


@pytest.mark.parametrize("backend", ["native", "transformers", "generate"])
def test_open_thoughts_are_closed_after_their_budget_and_others_left_alone(backend):
    params = SamplingParams(max_tokens=40, seed=1)
    thinking, plain = drawn(backend, rambling(eos_bias=-9.0), ["2 + 2 = <think>", "2 + 2 ="], params)
    count = len(ids(CLOSING))
    for one in thinking.completions:
        assert one.token_ids[BUDGET : BUDGET + count].tolist() == ids(CLOSING)
        assert one.mask.tolist() == [True] * BUDGET + [False] * count + [True] * (40 - BUDGET - count)
        assert CLOSING in one.text
        assert one.finish == "length"
    assert all(one.written.all() for one in plain.completions)


@pytest.mark.parametrize("backend", ["transformers", "generate"])
def test_greedy_budgets_are_those_of_the_native_engine_over_several_turns(backend):
    """Turns of other lengths than the budget, answered by an environment; thoughts that an answer opens again; limits in the midst."""
    reopened = ids("ok <think>")

    def environment(turns):
        return [reopened if len(turn.token_ids) < 60 else None for turn in turns]

    model = rambling(eos_bias=0.0)
    torch.manual_seed(0)
    model.lm_head.weight.data.normal_(std=3.0)
    texts = [f"{word} {mark}" for word in ("2 + 2 =", "Tom has 3", "a", "b", "why", "so") for mark in ("<think>", "")]
    params, ends = SamplingParams(max_tokens=120, temperature=0.0), [2, *range(30, 320, 12)]
    mine = drawn("native", model, texts, params, 1, environment, 10, eos_ids=ends)
    other = drawn(backend, model, texts, params, 1, environment, 10, eos_ids=ends)
    for one, its in zip(mine, other, strict=True):
        (a,), (b,) = one.completions, its.completions
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert (a.mask is None) == (b.mask is None) or bool(b.written.all())
        assert a.written.tolist() == b.written.tolist()
        assert (a.text, a.finish) == (b.text, b.finish)
        assert a.observed.tolist() == b.observed.tolist()
        answers = tiny_tokenizer().decode(a.token_ids[a.observed])
        assert "</think>" not in answers
        assert bool(answers) == ("ok <think>" in a.text)
    closed = [group.completions[0].text.count(CLOSING) for group in mine]
    assert max(closed) > 1
    assert min(closed) == 0


def test_a_stop_string_ends_a_completion_across_the_end_of_its_budget():
    model = rambling(eos_bias=-9.0)
    torch.manual_seed(0)
    model.lm_head.weight.data.normal_(std=3.0)
    params = SamplingParams(max_tokens=30, temperature=0.0)
    (plain,) = drawn("native", model, ["2 + 2 ="], params, 1)
    before, after = (tiny_tokenizer().decode(plain.completions[0].token_ids[: BUDGET + k]) for k in (-2, 2))
    params = replace(params, stop=(after[len(before) :],))
    for backend in ("native", "transformers"):
        (group,) = drawn(backend, model, ["2 + 2 ="], params, 1)
        assert [(one.num_tokens, one.finish) for one in group.completions] == [(BUDGET + 2, "stop")]


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints:UserWarning")
def test_options_of_generate_count_the_tokens_of_a_whole_turn():
    params, options = SamplingParams(max_tokens=30, seed=1), {"min_new_tokens": BUDGET + 3}
    (group,) = drawn("generate", rambling(eos_bias=99.0), ["2 + 2 ="], params, 1, generate=options)
    assert [(one.num_tokens, one.finish) for one in group.completions] == [(BUDGET + 4, "stop")]


def test_gigpo_counts_no_turn_for_closed_thoughts():
    """Two completions of one turn from one state: that of the whole group, so that each part of the advantage is the same."""
    (group,) = drawn("native", rambling(eos_bias=-9.0), ["2 + 2 = <think>"], SamplingParams(max_tokens=40, seed=1), 2)
    notes = EpisodeNotes(states=("s",))
    done = tuple(replace(one, episode=notes) for one in group.completions)
    scores = Scores.of([replace(group, completions=done, rewards=torch.tensor([[1.0], [0.0]]))])
    advantages = GiGPO(scale="none")(scores)[0]
    assert not scores.mask.all()
    assert advantages[scores.mask[0]].unique().tolist() == [-1.0, 1.0]


def test_no_prompt_has_no_group():
    assert drawn("transformers", rambling(), [], SamplingParams(max_tokens=40)) == []


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_log_probabilities_are_those_of_a_plain_forward_and_draws_repeat(backend):
    params, model = SamplingParams(max_tokens=40, seed=3), rambling()
    groups, again = (drawn(backend, model, ["a <think>", "b"], params) for _ in range(2))
    closed = 0
    for group, other in zip(groups, again, strict=True):
        expected = plain_logprobs(model, group, params)
        for one, its, plain in zip(group.completions, other.completions, expected, strict=True):
            assert one.token_ids.tolist() == its.token_ids.tolist()
            torch.testing.assert_close(one.logprobs[one.written], plain[one.written], atol=1e-4, rtol=0)
            closed += not bool(one.written.all())
    assert 0 < closed < 8


def test_a_completion_that_closes_its_thoughts_or_ends_in_time_is_that_of_a_run_without_a_budget():
    params, model = SamplingParams(max_tokens=40, seed=5), rambling(eos_bias=3.0)
    without = drawn("native", model, ["a <think>", "b <think>"], params, 8, budget=None)
    within = drawn("native", model, ["a <think>", "b <think>"], params, 8)
    pairs = [
        (a.token_ids.tolist(), b.token_ids.tolist())
        for one, its in zip(without, within, strict=True)
        for a, b in zip(one.completions, its.completions, strict=True)
    ]
    assert {len(a) <= BUDGET for a, _ in pairs} == {True, False}
    assert all((a == b) == (len(a) <= BUDGET) for a, b in pairs)
    assert all(a[:BUDGET] == b[:BUDGET] for a, b in pairs)


@pytest.mark.parametrize(
    ("before", "turn", "is_open"),
    [
        ("<think>", "hm", True),
        ("<think>\n", "hm", True),
        ("", "<think> hm", True),
        ("", "hm", False),
        ("<think>", "hm</think> so", False),
        ("<think></think>", "so", False),
        ("", "<think>a</think> b <think> c", True),
        ("<think>\nOkay, so", "hm", True),
        ("<think>\nOkay</think> It", "is", False),
        ("Write <think> first.<|im_end|>\n<|im_start|>assistant\n", "hm", False),
        ("<|im_end|>\n<|im_start|>assistant\n<think>\nOkay", "hm", True),
        ("Put thoughts behind <think> first. 2 + 2 =", "4", False),
    ],
)
def test_thoughts_are_open_from_their_mark_until_they_are_closed(before, turn, is_open):
    budget = ThinkingBudget.of(tiny_tokenizer(), 4)
    assert budget.is_thinking(ids(f"1 + 1 {before}"), ids(turn)) == is_open


def test_a_mark_that_holds_a_control_token_opens_thoughts_too():
    marks = ThoughtMarks("<|im_start|>thought", "<|im_end|>", "thinking")
    assert marks.are_open(tiny_tokenizer(), ids("1 + 1 <|im_start|>thought\n"))
    assert not marks.are_open(tiny_tokenizer(), ids("1 + 1 <|im_start|>thought\nhm<|im_end|>"))


def test_thoughts_that_end_with_a_message_are_refused(monkeypatch):
    channel = ThoughtMarks("<|message|>", "<|end|>", "thinking")
    monkeypatch.setattr("covey.rollout.thinking.thought_marks", lambda tokenizer: channel)
    with pytest.raises(ConfigError, match=r"end with '<\|end\|>' and begin another message"):
        ThinkingBudget.of(tiny_tokenizer(), 4)
