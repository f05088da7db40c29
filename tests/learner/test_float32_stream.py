"""With bfloat16 weights, sampler and learner keep the residual stream in float32 and agree as nearly as with float32 weights."""

from dataclasses import replace

import pytest
import torch

from covey.kernels import compile as compiled
from covey.learner import Policy
from covey.learner.packing import rows_of
from covey.models import float32_stream
from covey.rollout import NativeSampler, SamplingParams
from covey.rollout.hf import TransformersSampler
from kit import forgotten, rest_nightly, tiny_model, tiny_tokenizer

PROMPTS = [[5, 6, 7, 8] * 4, [9, 10, 11] * 4]


def rounded(dtype, arch="qwen2"):
    """A model of 8 layers whose weights are bfloat16's numbers, in `dtype`."""
    return tiny_model(arch, layers=8, hidden=64, dtype=torch.bfloat16, initializer_range=0.1).to(dtype)


def gap(model, sampler_class=NativeSampler):
    """Mean distance in nats of the log-probabilities of sampler and learner, both with bfloat16 products."""
    own = next(model.parameters()).dtype
    sampler = sampler_class(model, tiny_tokenizer(), dtype="bfloat16" if own == torch.float32 else "auto")
    drawn = list(sampler.sample(PROMPTS, 8, SamplingParams(max_tokens=12, seed=3)))
    groups = [replace(group, advantages=torch.ones(group.size)) for group in drawn]
    with torch.no_grad():
        measured = Policy(model, pad_id=0, compute_dtype=torch.bfloat16).measure(rows_of(groups))
    completions = [completion for group in groups for completion in group.completions]
    gaps = [(measured.logp[i, : one.num_tokens] - one.logprobs).abs() for i, one in enumerate(completions)]
    return float(torch.cat(gaps).mean())


@pytest.mark.parametrize("sampler", rest_nightly([NativeSampler, TransformersSampler], 1))
def test_bfloat16_weights_cost_no_agreement_of_sampler_and_learner(sampler):
    assert gap(rounded(torch.bfloat16), sampler) < 1.25 * gap(rounded(torch.float32), sampler)


def test_the_sampler_adds_in_float32_without_the_kernels_of_a_cpu_too(monkeypatch):
    """As on a GPU, where the written-out decoder adds by PyTorch's and Triton's operations."""
    monkeypatch.setenv("COVEY_CPU_KERNELS", "0")
    with forgotten(compiled.load):
        assert gap(rounded(torch.bfloat16)) < 1.25 * gap(rounded(torch.float32))


def test_the_stream_between_layers_is_float32_and_products_are_bfloat16():
    model, seen = rounded(torch.bfloat16), []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, given, found: seen.append((given[0].dtype, found.dtype)))
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, given, found: seen.append(found.dtype))
    policy = Policy(model, pad_id=0)
    with policy.autocast():
        model.model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
    assert set(seen) == {torch.bfloat16, (torch.float32, torch.float32)}
    assert not model.get_input_embeddings()._forward_hooks


def test_a_model_that_does_not_take_it_keeps_its_own_stream_and_says_so(caplog):
    model = rounded(torch.bfloat16)

    def strict(x):
        if x.dtype != torch.bfloat16:
            raise RuntimeError("expected bfloat16")
        return x

    model.model.layers[3].register_forward_pre_hook(lambda module, given: (strict(given[0]), *given[1:]))
    for _ in range(2):
        with float32_stream(model):
            assert model.get_input_embeddings()(torch.tensor([1])).dtype == torch.bfloat16
    assert caplog.text.count("keeps its residual stream in bfloat16: expected bfloat16") == 1


def test_gradients_of_bfloat16_weights_are_those_of_float32_weights_but_for_rounding():
    def gradient(dtype):
        model = rounded(dtype).train()
        groups = [replace(group, advantages=torch.ones(group.size)) for group in _drawn()]
        policy = Policy(model, pad_id=0, compute_dtype=torch.bfloat16)
        policy.measure(rows_of(groups)).logp.sum().backward()
        return torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()])

    wide, narrow = gradient(torch.float32), gradient(torch.bfloat16)
    assert (wide - narrow).norm() < 0.02 * wide.norm()


def _drawn():
    sampler = NativeSampler(rounded(torch.float32), tiny_tokenizer(), dtype="float32")
    return sampler.sample(PROMPTS, 4, SamplingParams(max_tokens=12, seed=3))
