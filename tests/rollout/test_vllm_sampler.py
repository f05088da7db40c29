"""vLLM behind the sampler's protocol. The weights are tested everywhere, the engine where vLLM is installed."""

from __future__ import annotations

import copy
import logging
import os
import random
import re

import numpy
import pytest
import torch

from covey.errors import ConfigError, ServerError
from covey.rollout import NativeSampler, SamplingParams
from covey.rollout.agreement import plain_logprobs
from covey.rollout.vllm import VLLMSampler, colocated, plain_weights
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_type_is_that_of_the_weights_whatever_the_file_says(dtype: str) -> None:
    model = adapted(tiny_model("qwen2").to(getattr(torch, dtype)))
    model.config.dtype = torch.float16
    assert colocated._dtype_of(model) == dtype


# -- with vLLM ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn() -> list[tuple[float, ...]]:
    """Numbers of the random generators after a seed, without and with the start of an engine between."""
    return []


@pytest.fixture(scope="module")
def sampler(drawn: list[tuple[float, ...]]) -> VLLMSampler:
    pytest.importorskip("vllm")
    model = tiny_model("qwen2", hidden=128, layers=2)
    model.config.dtype = torch.bfloat16  # as most files say, whose weights a run trains in float32
    for starts in (False, True):
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(7)
        if starts:
            sampler = VLLMSampler(model, tiny_tokenizer(), eos_ids=[2], max_rows=3)
        drawn.append((float(torch.rand(())), random.random(), float(numpy.random.rand())))
    return sampler


def test_it_draws_as_many_rows_at_once_as_it_is_asked_to(sampler: VLLMSampler) -> None:
    assert sampler.engine.llm_engine.vllm_config.scheduler_config.max_num_seqs == 3


def test_it_computes_in_the_type_of_the_weights_not_of_their_file(sampler: VLLMSampler) -> None:
    assert sampler.dtype == "float32"


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


def test_a_seed_repeats_the_draws(sampler: VLLMSampler) -> None:
    draw = lambda seed: completions_of(sampler, SamplingParams(max_tokens=8, seed=seed), n=4)
    assert draw(1) == draw(1) != draw(2)
    assert all(len({tuple(ids) for ids, _ in group}) > 1 for group in draw(1).values())


def test_a_load_of_weights_in_another_type_says_nothing(sampler: VLLMSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would warn of each weight, at every step."""
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", heard.append)
    logging.getLogger("vllm").addHandler(handler)
    try:
        sampler.load(tiny_model("qwen2", hidden=128, layers=2, seed=5).double(), version=0)
    finally:
        logging.getLogger("vllm").removeHandler(handler)
    assert [record.getMessage() for record in heard if record.levelno >= logging.WARNING] == []


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


def test_starting_it_leaves_the_random_generators_as_they_were(
    sampler: VLLMSampler, drawn: list[tuple[float, ...]]
) -> None:
    """vLLM seeds them with 0, so that runs of every seed would draw alike."""
    assert drawn[0] == drawn[1]


def completions_of(made: object, params: SamplingParams, n: int = 1) -> dict[str | None, list[tuple[list[int], str]]]:
    return {
        group.prompt.text: [(one.token_ids.tolist(), one.finish) for one in group.completions]
        for group in made.sample(PROMPTS, n, params)
    }


def test_stop_strings_end_completions_as_the_native_engines(sampler: VLLMSampler) -> None:
    model = tiny_model("qwen2", hidden=128, layers=2, seed=5)
    sampler.load(model, version=0)
    native = NativeSampler(model, tiny_tokenizer(), eos_ids=[2])
    whole = completions_of(native, SamplingParams(max_tokens=12, temperature=0.0))
    token = whole[PROMPTS[0]][0][0][3]
    params = SamplingParams(max_tokens=12, temperature=0.0, stop=(tiny_tokenizer().decode([token]),))
    assert completions_of(native, params) != whole
    assert completions_of(sampler, params) == completions_of(native, params)


def test_a_special_token_is_a_stop_string_too(sampler: VLLMSampler) -> None:
    tokenizer = tiny_tokenizer()
    text = tokenizer.pad_token
    model = tiny_model("qwen2", hidden=128, layers=2, seed=5)
    torch.nn.init.zeros_(model.model.norm.weight)  # all tokens are as likely, and greedy decoding takes the first
    sampler.load(model, version=0)
    params = SamplingParams(max_tokens=6, temperature=0.0, stop=(text,))
    assert tokenizer.pad_token_id == 0
    assert completions_of(sampler, params) == {one: [([0], "stop")] for one in PROMPTS}


def test_equal_completions_of_greedy_decoding_are_drawn_once(sampler: VLLMSampler) -> None:
    model = tiny_model("qwen2", hidden=128, layers=2, seed=5)
    sampler.load(model, version=0)
    native = NativeSampler(model, tiny_tokenizer(), eos_ids=[2])
    params = SamplingParams(max_tokens=6, temperature=0.0)
    assert completions_of(sampler, params, n=3) == completions_of(native, params, n=3)


@pytest.mark.filterwarnings("ignore")  # xgrammar's own
def test_completions_match_a_regular_expression(sampler: VLLMSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "regex", "[0-9]{1,3}")
    for group in sampler.sample(PROMPTS, 3, SamplingParams(max_tokens=8)):
        assert all(re.fullmatch(r"[0-9]{1,3}", one.text.strip()) for one in group.completions)


@pytest.mark.filterwarnings("error")  # one of xgrammar then ends the request
def test_a_completion_that_vllm_breaks_off_is_none(sampler: VLLMSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "regex", "[0-9]{1,4}")
    with pytest.raises(ServerError, match=r"broke a completion off \(\w+\)"):
        list(sampler.sample(PROMPTS, 3, SamplingParams(max_tokens=8)))


def test_new_weights_are_refused_while_an_earlier_sample_is_not_over(sampler: VLLMSampler) -> None:
    """vLLM keeps its prefix cache then, and would read keys and values of the weights before."""
    model, calls = tiny_model("qwen2", hidden=128, layers=2, seed=7), iter(range(9))

    def load() -> None:
        if next(calls, None) == 3:
            sampler.load(model, version=8)

    sampler.check_stop = load
    with pytest.raises(ServerError, match="still answers an earlier sample"):
        list(sampler.sample(PROMPTS, 1, SamplingParams(max_tokens=30)))
    sampler.check_stop = lambda: None
    groups = list(sampler.sample(PROMPTS, 1, SamplingParams(max_tokens=4)))
    for group, mine in zip(groups, plain_logprobs(model, groups), strict=True):
        torch.testing.assert_close(group.completions[0].logprobs, mine, atol=1e-4, rtol=0)
