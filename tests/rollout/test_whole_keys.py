"""Models whose own attention reads all keys: sampled by the engine, with shared prompts, from the policy of their plain forward."""

from __future__ import annotations

import pytest
import torch
from causal_classes import build
from plain_sampling import collect, ids_of

from covey.errors import Unsupported
from covey.kernels import choices, choosing_few
from covey.rollout import NativeSampler, SamplingParams, TransformersSampler, choose_sampler
from covey.rollout.agreement import plain_logprobs
from covey.rollout.whole_keys import WholeKeysForward
from covey.types import Prompt
from kit import rest_nightly, tiny_tokenizer

LENGTHS = (9, 1, 3, 9, 17)
PROMPTS = [Prompt(uid=str(i), token_ids=tuple(range(5 + i, 5 + i + n))) for i, n in enumerate(LENGTHS)]
ENDS = list(range(3, 40))
KINDS = {
    "minimax_m3_vl_text": "position",  # blocks of keys begin at their positions
    "doge": "end",
    "falcon": "end",
    "bloom": "end",  # ALiBi
    "gpt_neo": "end",  # windows of its own
    "nemotron": "end",
    "stablelm": "end",
    "xglm": "end",
    "diffllama": "end",  # attends twice
    "qwen4_exp_text": "end",  # blocks of keys beside states, one of them of token ids
}
"""In which order each reads its keys."""


def built(kind):
    model = build(kind)
    for module in model.modules():
        if hasattr(module, "keep_window_size"):
            torch.nn.init.normal_(module.A, generator=torch.Generator().manual_seed(0))
            module.keep_window_size = 6
    return model


def gaps_of(sampler, groups):
    """The largest difference of each completion's log-probabilities from a plain forward's; of Doge's without a token that repeats."""
    drawn = [(group, completion) for group in groups for completion in group.completions]
    gaps = []
    for (group, done), expected in zip(drawn, plain_logprobs(sampler.model, groups), strict=True):
        ids = [*group.prompt.token_ids, *done.token_ids.tolist()]
        if sampler.model.config.model_type != "doge" or len(set(ids)) == len(ids):
            gaps.append(float((done.logprobs - expected)[done.written].abs().max()))
    return gaps


@pytest.mark.parametrize("kind", rest_nightly(KINDS, ("minimax_m3_vl_text", "bloom")))
def test_log_probabilities_equal_a_plain_forward_whatever_enters_and_leaves(kind):
    sampler = choose_sampler(built(kind), tiny_tokenizer(), backend="native", eos_ids=ENDS, dtype="float32", max_rows=8)
    assert isinstance(sampler.forward, WholeKeysForward)
    assert sampler.forward.order == KINDS[kind]
    for temperature in (1.0, 0.0):
        groups = collect(
            sampler, PROMPTS, 2 + (temperature > 0), SamplingParams(max_tokens=16, seed=1, temperature=temperature)
        )
        gaps = gaps_of(sampler, groups)
        assert max(gaps) <= 1e-5
        if temperature:
            assert sum(completion.num_tokens for group in groups for completion in group.completions) > 30
            assert len(gaps) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("rows", rest_nightly((8, 3), 1))
@pytest.mark.parametrize("kind", rest_nightly(["minimax_m3_vl_text", "qwen4_exp_text"], 1))
def test_completions_equal_those_of_generate(kind, rows):
    """Greedy by transformers' `generate` itself, drawn by the sampler over it: one prompt at a time and several, three of each."""
    model = built(kind)
    native = NativeSampler(model, tiny_tokenizer(), eos_ids=ENDS, dtype="float32", max_rows=rows)
    by_generate = TransformersSampler(model, tiny_tokenizer(), eos_ids=ENDS, dtype="float32")
    by_generate.way = "generate"
    params = SamplingParams(max_tokens=12, seed=5)
    mine, theirs = (collect(sampler, PROMPTS, 3, params) for sampler in (native, by_generate))
    assert ids_of(mine) == ids_of(theirs)
    assert len({tuple(ids) for group in ids_of(mine) for ids in group}) > 10
    assert_close(mine, [done.logprobs for group in theirs for done in group.completions])
    groups = collect(native, PROMPTS, 3, SamplingParams(max_tokens=12, temperature=0))
    expected = []
    for group in groups:
        ids = torch.tensor([group.prompt.token_ids] * 3)
        options = {"attention_mask": torch.ones_like(ids), "eos_token_id": ENDS, "pad_token_id": 0}
        options |= {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 12, "do_sample": False}
        out = model.generate(ids, **options)
        logprobs = torch.stack(out.logits, 1).log_softmax(-1)
        written = out.sequences[:, ids.shape[1] :]
        for row, done in enumerate(group.completions):
            count = done.num_tokens
            assert done.token_ids.tolist() == written[row, :count].tolist()
            expected.append(logprobs[row, :count].gather(-1, written[row, :count, None]).squeeze(-1))
    assert_close(groups, expected)


def assert_close(groups, expected):
    drawn = [done.logprobs for group in groups for done in group.completions]
    torch.testing.assert_close(torch.cat(drawn), torch.cat(expected), atol=1e-5, rtol=0)


def test_a_prompt_of_one_token_begins_with_the_models_own_states():
    """Qwen4's ids before a text are those of its end, not 0."""
    sampler = NativeSampler(build("qwen4_exp_text"), tiny_tokenizer(), eos_ids=[3], dtype="float32")
    states = [place.initial for place in sampler.forward.states.places if not place.dtype.is_floating_point]
    assert states == [2]
    groups = collect(sampler, [Prompt(uid="0", token_ids=(40,))], 2, SamplingParams(max_tokens=3, seed=1))
    assert max(gaps_of(sampler, groups)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", rest_nightly(KINDS, ("minimax_m3_vl_text",)))
def test_answers_of_an_environment_enter_the_keys(kind):
    def environment(turns):
        return [[*range(60, 75 + turn.sample)] if len(turn.token_ids) < 9 else None for turn in turns]

    options = {"environment": environment, "max_rows": 6, "eos_ids": ENDS, "dtype": "float32"}
    sampler = NativeSampler(built(kind), tiny_tokenizer(), **options)
    groups = collect(sampler, PROMPTS[:3], 3, SamplingParams(max_tokens=40, seed=1))
    assert sum(int((~done.mask).sum()) for group in groups for done in group.completions) > 60
    assert max(gaps_of(sampler, groups)) <= 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("kind", rest_nightly(KINDS, ("bloom",)))
def test_completions_do_not_depend_on_the_batch(kind):
    sampler = NativeSampler(built(kind), tiny_tokenizer(), eos_ids=ENDS, dtype="float32")
    params = SamplingParams(max_tokens=12, seed=3)
    together = ids_of(collect(sampler, PROMPTS, 4, params))
    sampler.max_rows = 4
    assert ids_of(collect(sampler, PROMPTS, 4, params)) == together


@pytest.mark.nightly
def test_the_choice_of_blocks_decides_what_is_drawn():
    """Without it other tokens would be drawn: the cases above could fail."""
    model, params = build("minimax_m3_vl_text"), SamplingParams(max_tokens=16, seed=1)
    sampler = NativeSampler(model, tiny_tokenizer(), eos_ids=[2], dtype="float32")
    few = ids_of(collect(sampler, PROMPTS, 2, params))
    with choosing_few(model, 1000):
        assert ids_of(collect(sampler, PROMPTS, 2, params)) != few
    (module, names), *_ = choices(model)
    assert [getattr(module, name) for name in names] == [2, 2]


def test_keys_in_another_order_are_refused_at_the_start(monkeypatch):
    """The start's trial is of a few tokens, and of fewer blocks than the model chooses otherwise."""
    from covey.rollout import whole_keys

    monkeypatch.setattr(whole_keys, "choices", lambda model: [])
    with pytest.raises(Unsupported, match=r"MiniMaxM3VLForCausalLM has layers of kind minimax_m3_sparse|log-prob"):
        choose_sampler(build("minimax_m3_vl_text"), tiny_tokenizer(), backend="native", dtype="float32")


def test_a_choice_that_no_trial_shows_is_left_to_the_model(monkeypatch):
    monkeypatch.setattr("covey.kernels.indexers.COUNTS", ())
    with pytest.raises(Unsupported, match="has layers of kind minimax_m3_sparse"):
        NativeSampler(build("minimax_m3_vl_text"), tiny_tokenizer(), dtype="float32")


def test_other_precisions_are_sampled_too():
    model = build("falcon")
    sampler = NativeSampler(model, tiny_tokenizer(), eos_ids=[2], dtype="bfloat16")
    groups = collect(sampler, PROMPTS, 2, SamplingParams(max_tokens=4, seed=1))
    assert max(gaps_of(sampler, groups)) < 0.2
    sampler = NativeSampler(model.to(torch.bfloat16), tiny_tokenizer(), eos_ids=[2])
    assert max(gaps_of(sampler, collect(sampler, PROMPTS, 2, SamplingParams(max_tokens=4, seed=1)))) < 0.5
