"""A decode step in one call: bit for bit what the same kernels give when Python calls them one after the other."""

import pytest
import torch
from plain_sampling import TEXTS

from covey.kernels import matmul_bf16 as pairs
from covey.rollout import NativeSampler, SamplingParams, decoder
from kit import threads, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skipif(pairs.bf16_matmul() is None, reason="no kernel for this processor or compiler")
PARAMS = SamplingParams(max_tokens=90, seed=3)
"""Long enough for buffers to grow, with completions that end on the way."""


def drawn(model, prompts=TEXTS, count=5, params=PARAMS, **given):
    """Tokens and log-probabilities of all completions, and the sampler."""
    sampler = NativeSampler(model, tiny_tokenizer(), dtype="bfloat16", **given)
    groups = list(sampler.sample(prompts, count, params))
    return [(c.token_ids.tolist(), c.logprobs.tolist()) for group in groups for c in group.completions], sampler


@pytest.fixture
def one_by_one(monkeypatch):
    """Ends the whole step, without the rows that oneDNN's products are padded with."""
    return lambda: monkeypatch.setattr(decoder.Weights, "of", lambda *weights: ())


@pytest.mark.parametrize("arch", ["qwen2", "llama", "qwen3", "mistral"])
@pytest.mark.parametrize("rows", [256, 7], ids=["all at once", "as rows come free"])
def test_tokens_and_log_probabilities_are_the_same(arch, rows, one_by_one):
    model = tiny_model(arch, hidden=64, layers=3)
    whole, sampler = drawn(model, max_rows=rows)
    assert sampler.forward.weights is not None
    one_by_one()
    parts, sampler = drawn(model, max_rows=rows)
    assert not sampler.forward.weights
    assert len({len(tokens) for tokens, _ in whole}) > 1
    assert whole == parts


@pytest.mark.parametrize("count", [1, 3])
def test_threads_change_nothing(count):
    model = tiny_model(hidden=64, layers=2)
    expected, _ = drawn(model)
    with threads(count):
        assert drawn(model)[0] == expected


def test_weights_that_were_trained_since_are_sampled_with(one_by_one):
    model = tiny_model(hidden=64, layers=2)
    before, sampler = drawn(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    sampler.load(model, 1)
    after = list(sampler.sample(TEXTS, 5, PARAMS))
    after = [(c.token_ids.tolist(), c.logprobs.tolist()) for group in after for c in group.completions]
    assert after != before
    one_by_one()
    assert after == drawn(model)[0]


def test_without_kernels_of_attention_the_step_is_called_one_by_one(monkeypatch):
    """As where heads have a width that decode.cpp was not written for."""
    model = tiny_model(hidden=64, layers=2)
    called = []
    monkeypatch.setattr("covey.kernels.decode.DecodeKernels.decode", lambda *given: called.append(1))
    drawn(model, count=1, params=SamplingParams(max_tokens=3, seed=0), attention="torch")
    assert not called
