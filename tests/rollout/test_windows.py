"""Layers that see a window of the past only: the native engine writes what `generate` writes, wherever the window ends."""

import pytest
import torch
from causal_classes import build as built
from causal_table import gap_of
from plain_sampling import collect, ids_of, plain_logprobs
from windowed_models import LOCAL, PROMPTS, build

from covey.kernels import Window, attention_windows
from covey.rollout import NativeSampler, SamplingParams, TransformersSampler, Unsupported, choose_sampler
from covey.rollout.attention import causal
from covey.rollout.decoder import DecoderForward
from covey.rollout.softmax_attention import ScoreRule
from covey.rollout.whole_keys import WholeKeysForward
from kit import rest_nightly, tiny_tokenizer


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


QUICK = ("mistral",)
EACH = [pytest.param(arch, marks=() if arch in QUICK else pytest.mark.nightly) for arch in LOCAL]


@pytest.mark.parametrize("arch", EACH)
def test_every_kind_is_native_and_equals_generate(tokenizer, arch):
    model = build(arch)
    sampler = choose_sampler(model, tokenizer, backend="native", dtype="float32")
    for group in collect(sampler, PROMPTS, 2, SamplingParams(max_tokens=30, temperature=0)):
        ids = torch.tensor([group.prompt.token_ids])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30)
        for completion in group.completions:
            assert completion.token_ids.tolist() == expected[0, ids.shape[1] :].tolist(), arch


@pytest.mark.parametrize(
    "arch, attention",
    rest_nightly([(arch, "static") for arch in LOCAL], [(arch, "static") for arch in ("mistral",)])
    + [pytest.param(arch, "auto", marks=() if arch == "gemma3" else pytest.mark.nightly) for arch in LOCAL]
    + [pytest.param(arch, "torch", marks=pytest.mark.nightly) for arch in LOCAL],
)
def test_log_probabilities_equal_a_plain_forward(tokenizer, arch, attention):
    """Prompts shorter and longer than the window, rows of several ages beside each other."""
    model = build(arch)
    sampler = NativeSampler(
        model, tokenizer, dtype="float32", max_rows=6, attention="torch" if attention == "static" else attention
    )
    sampler.is_static = attention == "static"
    params = SamplingParams(max_tokens=30, seed=4, temperature=0.8)
    for group in sampler.sample(PROMPTS, 2, params):
        for completion, expected in zip(group.completions, plain_logprobs(model, group, params), strict=True):
            torch.testing.assert_close(completion.logprobs, expected, atol=1e-4, rtol=0)


def test_a_window_that_hides_nothing_changes_nothing(tokenizer):
    """The kernels go on as long as texts are shorter than the window."""
    params = SamplingParams(max_tokens=8, seed=1)
    wide, without = build("mistral", sliding_window=100), build("mistral", sliding_window=None)
    sampler = NativeSampler(wide, tokenizer, dtype="float32")
    assert isinstance(sampler.forward, DecoderForward)
    assert ids_of(collect(sampler, PROMPTS, 2, params)) == ids_of(
        collect(NativeSampler(without, tokenizer, dtype="float32"), PROMPTS, 2, params)
    )


@pytest.mark.slow
def test_draws_are_those_of_plain_transformers(tokenizer):
    model = build("gemma3")
    params = SamplingParams(max_tokens=30, seed=4)
    native = collect(NativeSampler(model, tokenizer, dtype="float32", max_rows=4), PROMPTS, 2, params)
    assert ids_of(native) == ids_of(collect(TransformersSampler(model, tokenizer), PROMPTS, 2, params))


@pytest.mark.parametrize("arch, kinds", [("gemma3", 6 * [Window(12)]), ("llama4", 4 * [Window(12, is_chunked=True)])])
def test_windows_are_read_from_the_models_own_masks(arch, kinds):
    expected = dict(enumerate([*kinds[:-1], None]))
    model = build(arch)
    assert attention_windows(model) == expected
    assert model.config._attn_implementation != "covey_probe"


def test_a_mask_of_another_kind_is_refused(tokenizer):
    model = build("gemma3", use_bidirectional_attention=True)
    with pytest.raises(Unsupported, match="neither causal nor a window"):
        NativeSampler(model, tokenizer, dtype="float32")


@pytest.mark.parametrize("window", [Window(5), Window(130), Window(7, is_chunked=True)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_prompts_are_computed_in_blocks_as_with_the_mask_written_out(window, has_sinks):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 300, 8), *torch.randn(2, 2, 2, 300, 8)
    sinks = torch.randn(4) if has_sinks else None
    place = torch.arange(300)
    seen = (place <= place[:, None]) & (place >= window.first(place)[:, None])
    scores = (query @ key.repeat_interleave(2, 1).mT * 0.3).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(2, -1, 300, 1)), -1)
    expected = scores.softmax(-1)[..., :300] @ value.repeat_interleave(2, 1)
    out = causal(query, key, value, ScoreRule(0.3, sinks=sinks), window)
    torch.testing.assert_close(out.transpose(1, 2), expected)


@pytest.mark.parametrize(
    "kind, reason",
    rest_nightly(
        [
            ("doge", "its layers choose the keys that a token sees"),
            ("minimax_m3_vl_text", "its layers attend with block_indices"),
        ],
        1,
    ),
)
def test_layers_that_choose_keys_by_their_content_are_left_to_the_models_attention(tokenizer, kind, reason):
    """They do so past some 2,048 tokens, which no short trial reaches."""
    model = built(kind)
    with pytest.raises(Unsupported, match=reason):
        attention_windows(model)
    for module in model.modules():
        if hasattr(module, "A"):  # zeros: all keys would have one score
            torch.nn.init.normal_(module.A)
    sampler = choose_sampler(model, tokenizer, eos_ids=[2])
    assert isinstance(sampler.forward, WholeKeysForward)
    assert gap_of(sampler, model) <= 1e-4
