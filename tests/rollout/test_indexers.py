"""Layers that choose their keys by an indexer (DeepSeek V3.2): sampled by the engine and learnt with shared prompts, with the model's own choice.

Keys with one score may be chosen either way, in transformers too; here there are none.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from causal_classes import INDEXED, build
from plain_sampling import collect, ids_of

from covey.errors import ConfigError
from covey.kernels import choosing_few, find_indexers
from covey.rollout import NativeSampler, SamplingParams, Unsupported, choose_sampler
from covey.rollout.agreement import plain_logprobs
from covey.types import Prompt
from kit import rest_nightly, tiny_tokenizer

LENGTHS = (9, 1, 3, 9, 40, 2, 17)
PROMPTS = [Prompt(uid=str(i), token_ids=tuple(range(5 + i, 5 + i + n))) for i, n in enumerate(LENGTHS)]
ENDS = list(range(3, 40))


def gap_of(sampler, groups):
    """Largest difference of a written token's log-probability from a plain forward's."""
    drawn = [completion for group in groups for completion in group.completions]
    pairs = zip(drawn, plain_logprobs(sampler.model, groups), strict=True)
    return max(float((a.logprobs - b)[a.written].abs().max()) for a, b in pairs)


@pytest.mark.parametrize(
    "kind, temperature",
    rest_nightly(product(INDEXED, (1.0, 0.0)), {("glm_moe_dsa", 1.0)}),
)
def test_log_probabilities_equal_a_plain_forward_whatever_enters_and_leaves(kind, temperature):
    sampler = choose_sampler(build(kind), tiny_tokenizer(), backend="native", eos_ids=ENDS, dtype="float32", max_rows=8)
    groups = collect(sampler, PROMPTS, 3, SamplingParams(max_tokens=24, seed=1, temperature=temperature))
    assert sum(completion.num_tokens for group in groups for completion in group.completions) > 100
    assert gap_of(sampler, groups) <= 1e-5


@pytest.mark.nightly
def test_the_choice_decides_what_is_drawn():
    """Without it other tokens would be drawn: the cases above could fail."""
    model, params = build("deepseek_v32"), SamplingParams(max_tokens=24, seed=1)
    draw = lambda: ids_of(
        collect(NativeSampler(model, tiny_tokenizer(), eos_ids=[2], dtype="float32"), PROMPTS, 3, params)
    )
    few = draw()
    with choosing_few(model, 1000):
        assert draw() != few
    assert {indexer.index_topk for indexer in find_indexers(model)} == {4}


@pytest.mark.nightly
def test_completions_do_not_depend_on_the_batch():
    sampler = NativeSampler(build("deepseek_v32"), tiny_tokenizer(), eos_ids=ENDS, dtype="float32")
    params = SamplingParams(max_tokens=16, seed=3)
    together = ids_of(collect(sampler, PROMPTS, 4, params))
    sampler.max_rows = 4
    assert ids_of(collect(sampler, PROMPTS, 4, params)) == together


@pytest.mark.slow
@pytest.mark.parametrize("kind", rest_nightly(INDEXED, ("deepseek_v32",)))
def test_answers_of_an_environment_are_chosen_from_too(kind):
    def environment(turns):
        return [[*range(60, 75 + turn.sample)] if len(turn.token_ids) < 9 else None for turn in turns]

    options = {"environment": environment, "max_rows": 6, "eos_ids": ENDS, "dtype": "float32"}
    sampler = NativeSampler(build(kind), tiny_tokenizer(), **options)
    groups = collect(sampler, PROMPTS, 3, SamplingParams(max_tokens=24, seed=1))
    assert sum(int((~done.mask).sum()) for group in groups for done in group.completions) > 100
    assert gap_of(sampler, groups) <= 1e-5


def test_an_engine_that_ignores_the_choice_is_refused_at_the_start(monkeypatch):
    """The start's trial is of a few tokens, and of fewer keys than the model chooses otherwise."""
    from covey.rollout import kv_cache

    monkeypatch.setattr(kv_cache.KeyBias, "of_chosen", lambda bias, places, owners: bias)
    with pytest.raises(Unsupported, match="logits differ from DeepseekV32ForCausalLM"):
        NativeSampler(build("deepseek_v32"), tiny_tokenizer(), dtype="float32")


def test_tritons_attention_is_refused_by_name():
    with pytest.raises(
        ConfigError, match="attention='triton' is not possible here: it does not read keys that an indexer"
    ):
        NativeSampler(build("deepseek_v32"), tiny_tokenizer(), attention="triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_in_bfloat16_the_engine_is_taken_as_well(dtype):
    sampler = NativeSampler(build("deepseek_v32").to(dtype), tiny_tokenizer(), eos_ids=[2])
    groups = collect(sampler, PROMPTS, 2, SamplingParams(max_tokens=4, seed=1))
    assert gap_of(sampler, groups) < 0.5
