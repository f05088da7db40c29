"""Completions of prompts with media: greedy as `generate`, the same whatever the batch, never a token that stands for an image or a sound."""

from dataclasses import replace

import pytest
import torch
from media_prompts import ALL, EMBEDDED, GREEDY, expect_drawn_is_measured, generated, prompts, tiny_of

from covey.errors import ConfigError, DataError, Unsupported
from covey.models.modalities import banned_ids
from covey.rollout import SamplingParams, choose_sampler
from covey.rollout.hf import TransformersSampler
from kit import rest_nightly

KIND = pytest.mark.parametrize("kind", rest_nightly(ALL, ("gemma3", "qwen2_audio")))


@KIND
def test_greedy_completions_are_those_of_generate(kind):
    model, processor = tiny_of(kind)
    found = prompts(processor, kind)
    groups = list(TransformersSampler(model, processor.tokenizer).sample(found, 2, GREEDY))
    for prompt, group in zip(found, groups, strict=True):
        expected = generated(model, processor, prompt)
        assert [done.token_ids.tolist() for done in group.completions] == [expected, expected]


@KIND
def test_options_of_generate_leave_the_media_with_their_prompts(kind):
    model, processor = tiny_of(kind)
    found = prompts(processor, kind)
    sampler = choose_sampler(model, processor.tokenizer, backend="generate", generate={"num_beams": 1})
    for prompt, group in zip(found, sampler.sample(found, 2, GREEDY), strict=True):
        expected = generated(model, processor, prompt)
        assert [done.token_ids.tolist() for done in group.completions] == [expected, expected]


def test_beams_over_several_images_of_a_prompt_are_refused():
    model, processor = tiny_of("llava")
    sampler = choose_sampler(model, processor.tokenizer, backend="generate", generate={"num_beams": 2})
    one, two, _ = prompts(processor, "llava")
    assert len(list(sampler.sample([one], 2, GREEDY))) == 1
    with pytest.raises(ConfigError, match="prompt 0:1 has 2 images or sounds, .* leave num_beams out"):
        list(sampler.sample([two], 2, GREEDY))


@pytest.mark.filterwarnings("ignore:Completions of prompts with media are written by plain transformers")
def test_with_a_thinking_budget_prompts_of_text_stay_with_the_native_engine(monkeypatch):
    model, processor = tiny_of("llava")
    sampler = choose_sampler(model, processor.tokenizer, thinking_tokens=2, attention="torch")
    monkeypatch.setattr(type(sampler), "reason_against_media", lambda self, prompt: "as a test says")
    seen = prompts(processor, "llava")[0]
    text = replace(seen, uid="text", media=None, token_ids=(5, 6, 7))
    drawn = []
    write = TransformersSampler.sample
    record = lambda self, given, *rest: drawn.extend(prompt.uid for prompt in given) or write(self, given, *rest)
    monkeypatch.setattr(TransformersSampler, "sample", record)
    groups = list(sampler.sample([seen, text], 1, GREEDY))
    assert {group.prompt.uid for group in groups} == {seen.uid, "text"}
    assert drawn
    assert all(uid.startswith(seen.uid) for uid in drawn)


@KIND
def test_the_learner_measures_what_the_sampler_drew(kind):
    model, processor = tiny_of(kind)
    sampler = TransformersSampler(model, processor.tokenizer)
    expect_drawn_is_measured(model, prompts(processor, kind), sampler, processor.tokenizer.pad_token_id)


@KIND
def test_a_placeholder_is_never_drawn(kind):
    model, processor = tiny_of(kind)
    banned = banned_ids(model)
    assert banned
    with torch.no_grad():  # such tokens are the likeliest by far
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.lm_head.weight.shape[0]))
        model.lm_head.bias[list(banned)] = 50.0
    group = next(
        iter(
            TransformersSampler(model, processor.tokenizer).sample(
                prompts(processor, kind)[:1], 4, SamplingParams(max_tokens=8)
            )
        )
    )
    drawn = {token for done in group.completions for token in done.token_ids.tolist()}
    assert drawn.isdisjoint(banned)


@pytest.mark.parametrize("kind", rest_nightly(EMBEDDED, ("qwen2_audio",)))
def test_the_native_engine_writes_greedily_what_generate_writes(kind):
    model, processor = tiny_of(kind)
    found = prompts(processor, kind)
    sampler = choose_sampler(model, processor.tokenizer, backend="native", dtype="float32")
    groups = {group.prompt.uid: group for group in sampler.sample(found, 2, GREEDY)}
    for prompt in found:
        expected = generated(model, processor, prompt)
        assert [done.token_ids.tolist() for done in groups[prompt.uid].completions] == [expected, expected]


def test_images_that_attend_both_ways_are_left_to_transformers_with_the_reason():
    model, processor = tiny_of("gemma3")
    found = prompts(processor, "gemma3")
    with pytest.raises(Unsupported, match="attend to each other in both directions"):
        list(choose_sampler(model, processor.tokenizer, backend="native", dtype="float32").sample(found, 1, GREEDY))
    sampler = choose_sampler(model, processor.tokenizer, dtype="float32")
    with pytest.warns(UserWarning, match="plain transformers, which is slower: tokens of an image attend"):
        groups = list(sampler.sample(found, 1, GREEDY))
    written = {group.prompt.uid: group.completions[0].token_ids.tolist() for group in groups}
    assert written == {prompt.uid: generated(model, processor, prompt) for prompt in found}


def test_expanded_ids_without_their_images_are_refused():
    model, processor = tiny_of("llava")
    ids = list(prompts(processor, "llava")[0].token_ids)
    with pytest.raises(DataError, match="prompt 0 holds placeholders of images or sounds but none of these"):
        list(TransformersSampler(model, processor.tokenizer).sample([ids], 1, GREEDY))
