"""Whatever a model keeps between tokens, a sampler draws from the policy of its plain forward, or is refused by name."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from causal_classes import build
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey.errors import ModelError, Unsupported
from covey.rollout import NativeSampler, SamplingParams, TransformersSampler, choose_sampler
from covey.rollout.agreement import expect_agreement, plain_logprobs
from covey.rollout.hf import _CachedBatch
from covey.types import Prompt
from kit import rest_nightly, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:Completions are written by plain transformers")
PROMPTS = [Prompt(uid=str(i), token_ids=ids) for i, ids in enumerate([tuple(range(5, 14)), (40,), (40, 41, 42)])]
WAYS = {
    "mamba": "generate",
    "mamba2": "cache",
    "falcon_mamba": "generate",
    "minimax": "generate",
    "bart": "generate",  # its positions are counted from the padding
    "recurrent_gemma": "generate",
    "rwkv": "alone",  # transformers mixes up the rows of a batch
    "bloom": "cache",
}
"""How the sampler of plain transformers decodes each."""
IN_CI = rest_nightly(WAYS, ("mamba2", "bart", "bloom"))


def largest_gap(sampler, model, **params):
    groups = list(sampler.sample(PROMPTS, 3, SamplingParams(max_tokens=8, seed=1, **params)))
    assert sorted(group.prompt.uid for group in groups) == ["0", "1", "2"]
    drawn = [one for group in groups for one in group.completions]
    return max(float((a.logprobs - b).abs().max()) for a, b in zip(drawn, plain_logprobs(model, groups), strict=True))


@pytest.mark.parametrize("kind", IN_CI)
def test_a_family_is_sampled_from_its_plain_forward(kind):
    model = build(kind)
    sampler = choose_sampler(model, tiny_tokenizer(), backend="transformers", eos_ids=[2])
    assert isinstance(sampler, TransformersSampler)
    assert sampler.way == WAYS[kind]
    assert largest_gap(sampler, model) <= 1e-4


def test_the_models_own_generation_config_does_not_act():
    model = build("mamba")
    plain = largest_gap(choose_sampler(model, tiny_tokenizer(), backend="transformers", eos_ids=[2]), model)
    model.generation_config.update(repetition_penalty=3.0, suppress_tokens=[40, 41], temperature=0.1)
    before = model.generation_config.to_dict()
    assert largest_gap(choose_sampler(model, tiny_tokenizer(), backend="transformers", eos_ids=[2]), model) == plain
    assert model.generation_config.to_dict() == before


def test_completions_of_a_model_with_a_state_end_and_keep_a_penalty():
    model, tokenizer = build("mamba2"), tiny_tokenizer()
    sampler = choose_sampler(model, tokenizer, backend="transformers", eos_ids=list(range(3, 200)))
    groups = list(sampler.sample(PROMPTS, 4, SamplingParams(max_tokens=8, seed=1)))
    for one in (one for group in groups for one in group.completions):
        assert [3 <= token < 200 for token in one.token_ids[:-1].tolist()] == [False] * (one.num_tokens - 1)
        assert (one.finish == "stop") == (3 <= one.token_ids[-1] < 200)
    assert {one.finish for group in groups for one in group.completions} == {"stop"}
    plain = choose_sampler(model, tokenizer, backend="transformers", eos_ids=[2])
    assert largest_gap(plain, model, repetition_penalty=2.0) > 1e-2


@pytest.mark.parametrize("kind", rest_nightly(WAYS, ("bart", "bloom")))
def test_a_family_goes_on_from_what_a_tool_answers(kind):
    model, tokenizer = build(kind), tiny_tokenizer()
    answer = lambda turns: [None if 7 in turn.token_ids else "7" for turn in turns]
    sampler = choose_sampler(model, tokenizer, backend="transformers", eos_ids=list(range(3, 60)), environment=answer)
    groups = list(sampler.sample(PROMPTS, 3, SamplingParams(max_tokens=12, seed=1)))
    drawn = [completion for group in groups for completion in group.completions]
    assert any(completion.mask is not None and not completion.mask.all() for completion in drawn)
    for completion, plain in zip(drawn, plain_logprobs(model, groups), strict=True):
        is_drawn = completion.mask if completion.mask is not None else torch.ones(len(plain), dtype=torch.bool)
        assert float((completion.logprobs - plain)[is_drawn].abs().max()) <= 1e-4


def test_one_seed_gives_the_same_completions_in_any_batch():
    model = build("mamba")
    sampler = choose_sampler(model, tiny_tokenizer(), backend="transformers", eos_ids=[2])
    params = SamplingParams(max_tokens=6, seed=1)
    together = {group.prompt.uid: group for group in sampler.sample(PROMPTS, 2, params)}
    for prompt in PROMPTS:
        alone = next(iter(sampler.sample([prompt], 2, params)))
        for a, b in zip(alone.completions, together[prompt.uid].completions, strict=True):
            assert torch.equal(a.token_ids, b.token_ids)


def test_a_sampler_that_draws_from_another_policy_is_refused_with_the_models_name():
    model = tiny_model("qwen2")
    sampler = NativeSampler(tiny_model("qwen2", seed=5), tiny_tokenizer())
    with pytest.raises(ModelError, match=r"Qwen2ForCausalLM cannot be sampled here: log-probabilities .* a token from"):
        expect_agreement(sampler, model)


@pytest.mark.parametrize("ends", rest_nightly([[2], list(range(3, 150))], 1))
def test_a_trial_whose_completions_end_at_once_is_drawn_again(ends):
    """GIT counts the padding of a short prompt: that shows after its first token only."""
    sampler = choose_sampler(build("git"), tiny_tokenizer(), eos_ids=ends)
    assert isinstance(sampler, TransformersSampler)
    assert sampler.way == "generate"


def test_the_option_that_needs_the_engine_is_named_where_it_refuses_the_model():
    sentence = r"^router_replay needs Covey's own engine, .* DeepseekV4ForCausalLM .*; leave router_replay out"
    with pytest.raises(Unsupported, match=sentence):
        choose_sampler(build("deepseek_v4"), tiny_tokenizer(), backend="native", eos_ids=[2], records_experts=True)


def test_a_model_that_no_way_fits_is_refused_before_the_first_step(tmp_path):
    model = build("roberta")
    args = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", num_generations=4, max_steps=1
    )
    data = Dataset.from_dict({"prompt": ["2 + 2 ="]})
    with pytest.raises(ModelError, match="RobertaForCausalLM cannot be sampled here"):
        GRPOTrainer(
            model,
            lambda completions, **columns: [0.0] * len(completions),
            args,
            data,
            processing_class=tiny_tokenizer(),
        ).train()


def test_a_cache_that_is_not_read_is_seen_and_another_way_taken(monkeypatch):
    """What state-space models did with `past_key_values`."""
    model = tiny_model("qwen2")
    forward = _CachedBatch._forward

    def forgets(batch, *given, **options):
        logits = forward(batch, *given, **options)
        return logits.roll(1, -1) if batch.mask.shape[1] > 5 else logits

    monkeypatch.setattr(_CachedBatch, "_forward", forgets)
    sampler = choose_sampler(model, tiny_tokenizer(), backend="transformers", eos_ids=[2])
    assert sampler.way == "generate"
    assert largest_gap(sampler, model) <= 1e-4


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_a_trial_leaves_random_generators_alone_and_looks_for_stops_between_its_tokens(backend):
    before = torch.get_rng_state()
    calls = []
    sampler = choose_sampler(tiny_model("qwen2"), tiny_tokenizer(), backend=backend, check_stop=lambda: calls.append(1))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(calls) >= 5
    calls.clear()
    list(sampler.sample(PROMPTS, 1, SamplingParams(max_tokens=2, seed=1)))
    assert calls


@pytest.mark.filterwarnings("default:Completions are written by plain transformers")
def test_the_fallback_names_its_price_by_a_trial_that_moves_no_random_number():
    from transformers import MBartConfig, MBartForCausalLM

    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    sizes = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
    model = MBartForCausalLM(MBartConfig(vocab_size=len(tokenizer), is_encoder_decoder=False, **sizes)).eval()
    before = torch.get_rng_state()
    price = r"trial of 4 short completions, 1,000 tokens of each take [\d.e+]+ s\.$"
    with pytest.warns(UserWarning, match=price):
        choose_sampler(model, tokenizer)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "options", [{"backend": "transformers"}, {"backend": "generate", "generate": {"num_beams": 2}}]
)
def test_a_sampler_of_transformers_that_was_chosen_names_its_price_too(options, caplog):
    tokenizer, model = tiny_tokenizer(), tiny_model("qwen2")
    before = torch.get_rng_state()
    choose_sampler(model, tokenizer, **options)
    assert torch.equal(torch.get_rng_state(), before)
    (record,) = caplog.records
    assert re.search(r"as asked\. .*1,000 tokens of each take [\d.e+]+ s\.$", record.getMessage())


@pytest.mark.nightly
def test_a_length_that_no_trial_reaches_is_named_at_the_start():
    """Doge, which scores all copies of a token alike, so that any of them may be chosen."""
    model = build("doge")
    for module in model.modules():
        if hasattr(module, "keep_window_size"):
            module.keep_window_size = 16
    model.config.keep_window_size = 16
    with pytest.warns(UserWarning, match=r"^DogeForCausalLM .* more than 16 tokens \(keep_window_size\); keep prompt"):
        sampler = choose_sampler(model, tiny_tokenizer(), backend="transformers", eos_ids=[2])
    with pytest.warns(UserWarning, match=r"^DogeForCausalLM .* more than 16 tokens \(keep_window_size\); keep prompt"):
        choose_sampler(model, tiny_tokenizer(), eos_ids=[2])  # natively
    short, long = (list(sampler.sample(PROMPTS, 2, SamplingParams(max_tokens=n, seed=1))) for n in (4, 40))
    gap = lambda groups: max(
        float((done.logprobs - expected).abs().max())
        for done, expected in zip(
            (c for g in groups for c in g.completions), plain_logprobs(model, groups), strict=True
        )
    )
    assert gap(short) <= 1e-4
    assert gap(long) > 1e-3
    model.config.max_position_embeddings = 16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose_sampler(model, tiny_tokenizer(), backend="transformers", eos_ids=[2])
