"""vLLM behind the sampler's protocol. The weights are tested everywhere, the engine where vLLM is installed."""

from __future__ import annotations

import copy
import os

import pytest
import torch

from covey.errors import ConfigError
from covey.rollout import NativeSampler, SamplingParams
from covey.rollout.vllm import VLLMSampler, plain_weights
from kit import tiny_model, tiny_tokenizer

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# vLLM 0.32 looks at every name of torch.distributed when it starts
pytestmark = pytest.mark.filterwarnings("ignore:.torch.distributed.reduce_op. is deprecated:FutureWarning")


def adapted(model: torch.nn.Module) -> torch.nn.Module:
    peft = pytest.importorskip("peft")
    policy = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    return policy


def test_weights_go_out_under_their_own_names() -> None:
    model = tiny_model("qwen2")
    found = dict(plain_weights(model))
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], weight) for name, weight in model.state_dict().items())


def test_an_adapter_is_added_to_a_copy_and_the_policy_stays_as_it_is() -> None:
    model = tiny_model("qwen2")
    names = list(model.state_dict())
    policy = adapted(model)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    found = dict(plain_weights(policy))
    merged = copy.deepcopy(policy).merge_and_unload().state_dict()
    assert sorted(found) == sorted(names)
    for name in names:
        assert torch.allclose(found[name], merged[name], atol=1e-6), name
    assert all(torch.equal(before[name], weight) for name, weight in policy.state_dict().items())
    changed = [
        name for name in names if not torch.equal(found[name], before.get(f"base_model.model.{name}", found[name]))
    ]
    assert changed == []  # what has no adapter goes out untouched


def test_without_vllm_a_sentence_says_what_to_install() -> None:
    try:
        import vllm  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match="use_vllm=True .*pip install vllm"):
            VLLMSampler(tiny_model("qwen2"), tiny_tokenizer())
    else:
        pytest.skip("vLLM is installed here")


# -- with vLLM ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampler() -> VLLMSampler:
    pytest.importorskip("vllm")
    model = tiny_model("qwen2", hidden=128, layers=2)
    return VLLMSampler(model, tiny_tokenizer(), eos_ids=[2], dtype="float32")


PROMPTS = ["Tom has 3 apples.", "2 + 2 =", "Hello"]


def test_greedy_is_the_native_engines_greedy(sampler: VLLMSampler) -> None:
    model = tiny_model("qwen2", hidden=128, layers=2, seed=5)
    sampler.load(model, version=3)
    params = SamplingParams(max_tokens=12, temperature=0.0)
    native = {g.prompt.text: g for g in NativeSampler(model, tiny_tokenizer(), eos_ids=[2]).sample(PROMPTS, 1, params)}
    for group in sampler.sample(PROMPTS, 1, params):
        theirs, ours = native[group.prompt.text].completions[0], group.completions[0]
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert torch.allclose(ours.logprobs, theirs.logprobs, atol=2e-3)
        assert (ours.finish, ours.version) == (theirs.finish, 3)


def test_drawn_completions_carry_their_own_log_probabilities(sampler: VLLMSampler) -> None:
    model = tiny_model("qwen2", hidden=128, layers=2, seed=5)
    sampler.load(model, version=0)
    for group in sampler.sample(PROMPTS, 4, SamplingParams(max_tokens=10, temperature=0.7)):
        assert len(group.completions) == 4
        for completion in group.completions:
            ids = torch.tensor([[*group.prompt.token_ids, *completion.token_ids.tolist()]])
            with torch.no_grad():
                logp = (model(ids).logits[0].float() / 0.7).log_softmax(-1)
            start = len(group.prompt.token_ids)
            expected = logp[start - 1 : -1].gather(1, completion.token_ids[:, None])[:, 0]
            assert torch.allclose(completion.logprobs, expected, atol=5e-3)


def test_leaving_in_the_middle_leaves_nothing_behind(sampler: VLLMSampler) -> None:
    class EnoughError(Exception):
        pass

    def stop() -> None:
        raise EnoughError

    sampler.check_stop = stop
    with pytest.raises(EnoughError):
        list(sampler.sample(PROMPTS, 2, SamplingParams(max_tokens=50)))
    sampler.check_stop = lambda: None
    assert not sampler.engine.llm_engine.has_unfinished_requests()
    assert len(list(sampler.sample(PROMPTS, 2, SamplingParams(max_tokens=4)))) == 3
