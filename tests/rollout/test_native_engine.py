"""The native engine: which architectures it runs, that scheduling changes nothing, that caches grow and shrink rightly."""

import warnings
from itertools import product

import pytest
import torch
from native_models import NATIVE, build
from plain_sampling import TEXTS, collect, favour, ids_of, plain_logprobs

from covey.errors import ConfigError
from covey.rollout import NativeSampler, SamplingParams, TransformersSampler, Unsupported, choose_sampler
from covey.rollout.kv_cache import KVCache
from covey.rollout.requests import GroupRequest
from covey.rollout.scheduler import Scheduler
from covey.rollout.softmax_attention import HIDDEN, AttentionPart, RowMap, ScoreRule, by_one_softmax, wide
from covey.rollout.turns import TurnSampler
from covey.types import Prompt
from kit import rest_nightly, tiny_model, tiny_tokenizer

IN_CI = ("gemma2", "gpt2", "qwen3_moe")
FALLS_BACK = {
    "rwkv": ("Rwkv", {}, "interface"),
    "mbart": (
        "MBart",
        {"is_encoder_decoder": False, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
        "interface",
    ),
}


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


@pytest.mark.parametrize("arch", rest_nightly(NATIVE, ("gpt2", "qwen3_moe")))
def test_an_architecture_runs_natively_and_equals_generate(tokenizer, arch):
    model = build(*NATIVE[arch])
    sampler = choose_sampler(model, tokenizer, backend="native", dtype="float32")
    groups = collect(sampler, TEXTS, 2, SamplingParams(max_tokens=40, temperature=0))
    for group in groups:
        ids = torch.tensor([group.prompt.token_ids])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
        for completion in group.completions:
            assert completion.token_ids.tolist() == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("arch", rest_nightly(NATIVE, IN_CI))
def test_log_probabilities_of_an_architecture_equal_a_plain_forward(tokenizer, arch):
    model = build(*NATIVE[arch], seed=1)
    params = SamplingParams(max_tokens=24, seed=4, temperature=0.8, top_p=0.95)
    for group in NativeSampler(model, tokenizer, dtype="float32").sample(TEXTS[:2], 3, params):
        for completion, expected in zip(group.completions, plain_logprobs(model, group, params), strict=True):
            torch.testing.assert_close(completion.logprobs, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("arch", rest_nightly(FALLS_BACK, ["mbart"]))
def test_what_the_engine_cannot_run_falls_back_and_says_why(tokenizer, arch):
    name, options, reason = FALLS_BACK[arch]
    model = build(name, options)
    with pytest.raises(Unsupported, match=reason):
        choose_sampler(model, tokenizer, backend="native", dtype="float32")
    with pytest.warns(UserWarning, match=reason) as caught:
        sampler = choose_sampler(model, tokenizer, backend="auto")
    assert len(caught) == 1
    assert isinstance(sampler, TransformersSampler)


def test_a_fallback_keeps_what_it_can_of_the_options_and_names_the_rest(tokenizer):
    model = build(*FALLS_BACK["mbart"][:2])
    with pytest.warns(UserWarning, match="Without effect there: cache_bytes"):
        sampler = choose_sampler(model, tokenizer, max_rows=7, cache_bytes=10)
    assert sampler.max_rows == 7
    with pytest.warns(UserWarning, match="interface"):  # and an environment, whose turns it takes one after the other
        turns = choose_sampler(model, tokenizer, environment=lambda turns: [None] * len(turns))
    assert isinstance(turns, TurnSampler)


def test_backends_are_chosen_by_name(tokenizer):
    model = tiny_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(choose_sampler(model, tokenizer), NativeSampler)
        assert isinstance(choose_sampler(model, tokenizer, backend="transformers"), TransformersSampler)
    with pytest.raises(ConfigError, match="take one of auto, native, transformers, generate, vllm"):
        choose_sampler(model, tokenizer, backend="vlm")


def test_an_engine_that_computes_something_else_is_refused(tokenizer):
    """A layer that treats our call differently from its own: the check at the start notices."""
    model = tiny_model("gpt2")
    attention = model.transformer.h[0].attn
    forward = attention.forward

    def shifted(*args, **kwargs):
        out, weights = forward(*args, **kwargs)
        return (out + torch.randn_like(out) if "covey_batch" in kwargs else out), weights

    attention.forward = shifted
    with pytest.raises(Unsupported, match="logits differ"):
        NativeSampler(model, tokenizer)


PROMPTS = [list(range(5, 5 + length)) for length in (3, 1, 40, 7, 70, 2, 33, 12, 5)]


RICH = {"repetition_penalty": 1.2, "top_k": 60, "stop": ("e",)}


@pytest.mark.parametrize(
    "options, more",
    rest_nightly(
        [
            *[({"cache_bytes": 60_000}, RICH), ({"max_rows": 4}, {}), ({"max_rows": 4}, RICH)],
            *[({"cache_bytes": 60_000}, {}), *product(({"max_rows": 9}, {"cache_bytes": 1}), ({}, RICH))],
        ],
        1,
    ),
)
def test_scheduling_does_not_change_a_completion(tokenizer, options, more):
    """Several waves, rows of every age side by side, prompts of 1 to 70 tokens, suffixes beyond one block of columns."""
    model = favour(tiny_model(layers=2, seed=3), range(320), bias=0.0)
    model.lm_head.bias.data[2] = 2.5  # a completion ends after about 30 tokens
    params = SamplingParams(max_tokens=100, seed=7, **more)
    all_at_once = collect(NativeSampler(model, tokenizer, dtype="float32"), PROMPTS, 4, params)
    in_waves = collect(NativeSampler(model, tokenizer, dtype="float32", **options), PROMPTS, 4, params)
    assert ids_of(all_at_once) == ids_of(in_waves)
    lengths = {completion.num_tokens for group in all_at_once for completion in group.completions}
    assert len(lengths) > 15
    plain = collect(TransformersSampler(model, tokenizer), PROMPTS, 4, params)
    assert ids_of(plain) == ids_of(all_at_once)


def test_groups_come_out_as_they_finish(tokenizer):
    model = favour(tiny_model(max_position_embeddings=40), [5])
    sampler = NativeSampler(model, tokenizer, dtype="float32")
    order = [group.prompt.uid for group in sampler.sample([[5] * 10, [5] * 35, [5] * 20], 2, SamplingParams())]
    assert order == ["1", "2", "0"]


def test_rows_of_finished_completions_are_given_away_before_their_group_is_finished(tokenizer):
    model = favour(tiny_model(max_position_embeddings=4096), [5, 2], bias=30.0)
    model.lm_head.bias.data[5] += 2.0
    sampler = NativeSampler(model, tokenizer, dtype="float32", max_rows=8)
    under_way = []
    step = Scheduler._step

    def watched(self):
        assert self.num_rows <= 8
        under_way.append(len(self.open))
        return step(self)

    params = SamplingParams(max_tokens=100, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_step", watched)
        groups = collect(sampler, [[5]] * 20, 4, params)
    assert max(under_way) > 2
    assert ids_of(groups) == ids_of(collect(NativeSampler(model, tokenizer, dtype="float32"), [[5]] * 20, 4, params))


def test_a_call_given_up_early_leaves_no_trace(tokenizer):
    model = tiny_model()
    model.train()
    sampler = NativeSampler(model, tokenizer, dtype="float32", max_rows=2)
    groups = sampler.sample(TEXTS, 2, SamplingParams(max_tokens=30, seed=1))
    first = next(groups)
    groups.close()
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    again = next(sampler.sample(TEXTS, 2, SamplingParams(max_tokens=30, seed=1)))
    assert ids_of([first]) == ids_of([again])


def test_two_calls_may_be_under_way_at_once(tokenizer):
    sampler = NativeSampler(tiny_model(layers=2), tokenizer, dtype="float32", max_rows=2)
    params = SamplingParams(max_tokens=20, seed=1)
    alone = ids_of(sampler.sample(TEXTS, 2, params))
    one, two = sampler.sample(TEXTS, 2, params), sampler.sample(TEXTS, 2, params)
    pairs = [group for pair in zip(one, two, strict=True) for group in pair]
    assert ids_of(pairs[::2]) == ids_of(pairs[1::2]) == alone


def test_memory_held_follows_what_is_in_flight(tokenizer):
    """Columns grow by blocks with the age of the oldest row, not with max_tokens."""
    model = favour(tiny_model(max_position_embeddings=4096), [5, 2], bias=30.0)
    sampler = NativeSampler(model, tokenizer, dtype="float32")
    widths = []
    original = KVCache.begin_step

    def watched(self):
        grew = original(self)
        widths.append(self.suffix[0].shape[3])
        return grew

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "begin_step", watched)
        list(sampler.sample([[5]] * 40, 2, SamplingParams(max_tokens=4000, seed=0)))
    assert max(widths) <= 64


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_two_parts_equal_one_softmax_over_all_keys(softcap):
    heads, repeats, width, owners = 2, 3, 8, [1, 0, 1, 1, 2]
    query = torch.randn(len(owners), heads, repeats, width)
    own_keys, own_values = torch.randn(2, len(owners), heads, 19, width)
    keys, values = torch.randn(2, 3, heads, 11, width)
    own_bias, bias = torch.zeros(len(owners), 19), torch.zeros(3, 11)
    own_bias[1, 3:9], bias[1, 5:], bias[2] = HIDDEN, HIDDEN, HIDDEN  # the last prompt has no keys at all
    all_keys, all_values = torch.cat((keys[owners], own_keys), 2), torch.cat((values[owners], own_values), 2)
    scores = query @ all_keys.transpose(2, 3) * 0.3
    scores = scores if softcap is None else (scores / softcap).tanh() * softcap
    expected = (scores + torch.cat((bias[owners], own_bias), 1)[:, None, None]).softmax(-1) @ all_values
    own = AttentionPart(own_keys, own_values, wide(own_bias[:, None], heads))
    shared = AttentionPart(keys, values, wide(bias[:, None], heads))
    row_map = RowMap.of(owners, 3, torch.device("cpu"))
    torch.testing.assert_close(by_one_softmax(query, own, shared, row_map, ScoreRule(0.3, softcap)), expected)


def test_rows_are_gathered_by_prompt_and_scattered_back():
    row_map = RowMap.of([2, 0, 2, 1, 0, 2], 3, torch.device("cpu"))
    query = torch.randn(6, 2, 3, 4)
    grouped = row_map.gather(query)
    assert grouped.shape == (3, 2, 9, 4)
    torch.testing.assert_close(grouped[0, :, 3:6], query[4])
    torch.testing.assert_close(row_map.scatter(grouped, 3), query)
    assert not row_map.is_regular
    assert RowMap.of([0, 0, 1, 1], 2, torch.device("cpu")).is_regular


def test_ambiguous_prompts_are_read_as_their_ids(tokenizer):
    """Two spellings of one text are two prompts with two answers."""
    usual = tokenizer("apples")["input_ids"]
    letters = [tokenizer(letter)["input_ids"][0] for letter in "apples"]
    assert tokenizer.decode(usual) == tokenizer.decode(letters)
    assert usual != letters
    model = tiny_model(layers=2)
    for group in NativeSampler(model, tokenizer, dtype="float32").sample(
        [usual, letters], 1, SamplingParams(max_tokens=8, seed=0)
    ):
        (expected,) = plain_logprobs(model, group, SamplingParams())
        torch.testing.assert_close(group.completions[0].logprobs, expected, atol=1e-4, rtol=0)


def test_rows_are_as_many_as_memory_holds_on_an_accelerator_and_256_on_a_cpu():
    model, tokenizer = tiny_model("qwen2"), tiny_tokenizer()
    sampler = NativeSampler(model, tokenizer)
    requests = [GroupRequest(Prompt(uid=str(i), token_ids=(5,) * 64), (1, 2, 3, 4), 64) for i in range(3)]
    assert sampler.rows_at_once(requests, budget=2**30) == 256
    sampler.forward.device = torch.device("cuda")  # a name: nothing is computed on it
    a_row = requests[0].cache_bytes(sampler.forward) // 4 + 16 * sampler.forward.vocab_size
    assert sampler.rows_at_once(requests, budget=100 * a_row) == 96  # 64, 96, 128: what steps are captured for
    assert sampler.rows_at_once(requests, budget=0) == 8
    assert NativeSampler(model, tokenizer, max_rows=7).rows_at_once(requests, budget=2**40) == 7


def test_a_share_of_free_memory_is_for_keys_and_values():
    model, tokenizer = tiny_model("qwen2"), tiny_tokenizer()
    most, half = (NativeSampler(model, tokenizer, cache_fraction=share).budget() for share in (1.0, 0.01))
    assert half < most / 20
    with pytest.raises(ConfigError, match="cache_fraction is 0"):
        NativeSampler(model, tokenizer, cache_fraction=0)


SCALED = {
    "dynamic": {"max_position_embeddings": 600},
    "longrope": {"max_position_embeddings": 2400, "original_max_position_embeddings": 600,
        "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALED)
def test_frequencies_that_depend_on_the_length_are_those_of_the_text_and_not_of_a_larger_table(tokenizer, kind):
    """Of 540 tokens, where those for long texts begin at 600 and a table of rotations grows by doubling."""
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0, **SCALED[kind]}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=rope.pop("max_position_embeddings"))
    for name, weight in model.named_parameters():
        weight.data.mul_(8.0 if "proj" in name else 1.0)
    prompt = Prompt(uid="0:0", token_ids=tuple(3 + i * 7 % 200 for i in range(500)))
    params = SamplingParams(max_tokens=40, seed=3)
    (group,) = NativeSampler(model, tokenizer, dtype="float32", eos_ids=[1]).sample([prompt], 2, params)
    for completion, expected in zip(group.completions, plain_logprobs(model, group, params), strict=True):
        assert completion.logprobs.sub(expected).abs().max() < 1e-4
