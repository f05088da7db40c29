"""Shared prompts in layers with windows, capped scores and sinks, and under any attention that a model was loaded with."""

import pytest
import torch
import transformers
from shared_rows import ROWS, assert_same, biased_by_distance, checkpointing, gradients, policy_by, row, without_dropout
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from covey.kernels import Layout, Window
from covey.kernels.flex_attention import _KeyRanges, mask_of
from covey.learner.policy import Policy
from covey.learner.shared_prompt import share_rows
from kit import rest_nightly, tiny_model

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": 64, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
LONG = [row(0, range(5, 14), [9, 10, 11, 12, 13, 14, 15]), row(1, [12, 13], [14]), row(0, range(5, 14), [15, 3])]
LONG += [row(1, [12, 13], [16, 17, 18, 19, 20, 21]), row(0, range(5, 14), [20, 21, 22])]
"""Prompts shorter and longer than a window of 4, and completions that leave their prompt behind."""

KINDS = {
    "mistral": ("Mistral", {}),
    "gemma2": ("Gemma2", {"attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3Text", {"layer_types": ["sliding_attention", "full_attention"]}),
    "llama4": ("Llama4Text", {**EXPERTS, "attention_chunk_size": 4}),
    "gpt_oss": ("GptOss", EXPERTS),
}
OWN, BY_PART, FLEX = "one function on a CPU", "SDPA by part", "FlexAttention, uncompiled"


def build(kind, **more):
    name, options = KINDS[kind]
    given = {"sliding_window": 4} if "sliding_window" not in more else {}
    config = getattr(transformers, f"{name}Config")(**(SHAPE | given | options | more))
    torch.manual_seed(0)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
    if kind == "gemma2":
        model.config._attn_implementation = "eager"  # SDPA of transformers before 5.23 leaves the cap out
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.0)
    return without_dropout(model)


@pytest.mark.parametrize(
    "kind, kernel, recomputes",
    [(kind, OWN, False) for kind in KINDS]
    + [("gpt_oss", BY_PART, False), ("llama4", OWN, True), ("gpt_oss", FLEX, True)]
    + rest_nightly([("mistral", BY_PART, False)], 0)
    + rest_nightly([(kind, FLEX, False) for kind in ("gemma3", "llama4", "mistral", "gemma2")], 0)
    + rest_nightly([*((kind, OWN, True) for kind in KINDS if kind != "llama4"), ("mistral", BY_PART, True)], 0)
    + rest_nightly([("gpt_oss", FLEX, False), *((kind, FLEX, True) for kind in KINDS if kind != "gpt_oss")], 0),
)
def test_a_window_gives_the_values_and_gradients_of_one_row_at_a_time(kind, kernel, recomputes, flex_on_a_cpu):
    model = build(kind)
    apart = gradients(Policy(model, pad_id=0), [[one] for one in LONG])
    policy = policy_by(kernel, checkpointing(model) if recomputes else model)
    assert_same(gradients(policy, [LONG]), apart)


def test_a_window_that_hides_nothing_is_not_asked():
    """The kernel for the whole row goes on where texts are no longer than the window."""
    policy = Policy(build("mistral", sliding_window=16), pad_id=0)
    assert policy.shares_prompts()
    rows = share_rows(LONG, torch.device("cpu"))
    assert max(one.num_tokens for one in LONG) == 16
    assert policy.windows == {0: Window(16), 1: Window(16)}
    assert rows.window_of(0) is None


@pytest.mark.parametrize("window", [Window(3), Window(150), Window(70, is_chunked=True)])
def test_the_blocks_of_a_window_are_those_that_torch_finds_by_looking_at_every_pair(window):
    layouts = (Layout(0, 300, (1, 200)), Layout(501, 7, ()), Layout(508, 1, (260,)), Layout(769, 127, ()))
    mask = mask_of(layouts, torch.device("cpu"), window)
    dense = create_block_mask(_KeyRanges.of(layouts, window).allows(), None, None, 896, 896, device="cpu")
    assert torch.equal(mask.to_dense(), dense.to_dense())
    starts = [(n, begin) for one in layouts for n, begin in ((one.length, 0), *((n, one.length) for n in one.counts))]
    position = torch.cat([torch.arange(count) + begin for count, begin in starts])
    at = torch.arange(896)
    everything = _KeyRanges.of(layouts).allows()(None, None, at[:, None], at[None])
    within = _KeyRanges.of(layouts, window).allows()(None, None, at[:, None], at[None])
    assert torch.equal(within, everything & (position >= window.first(position)[:, None]))


def double(module, query, key, value, attention_mask, **options):
    out, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return 2 * out, weights


@pytest.mark.parametrize("loaded", rest_nightly(["eager", "sdpa", "stand_in_for_flash"], 1))
def test_prompts_are_shared_whatever_attention_the_model_was_loaded_with(loaded):
    AttentionInterface.register("stand_in_for_flash", sdpa_attention_forward)
    expect_sharing(tiny_model("llama", layers=2), loaded)


@pytest.mark.gpu  # on a CPU torch 2.13's FlexAttention has no backward pass, and its values vary from call to call
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_prompts_are_shared_by_a_model_that_was_loaded_with_flex_attention():
    expect_sharing(tiny_model("llama", layers=2, hidden=64).cuda(), "flex_attention")


def expect_sharing(model, loaded):
    want = gradients(Policy(model, pad_id=0), [[one] for one in ROWS])
    model.config._attn_implementation = loaded
    policy = Policy(model, pad_id=0)
    assert policy.shares_prompts()
    assert_same(gradients(policy, [ROWS]), want)
    policy.release()
    assert model.config._attn_implementation == loaded


def test_an_attention_that_computes_something_else_is_not_replaced(caplog):
    AttentionInterface.register("doubled", double)
    model = tiny_model("llama", layers=2)
    usual = gradients(Policy(model, pad_id=0), [[one] for one in ROWS])
    model.config._attn_implementation = "doubled"
    apart = gradients(Policy(model, pad_id=0), [[one] for one in ROWS])
    with pytest.raises(AssertionError):
        assert_same(apart, usual)
    policy = Policy(model, pad_id=0)
    assert policy.shares_prompts()
    assert_same(gradients(policy, [ROWS]), apart)
    assert "in its layers LlamaAttention alone, whose own attention reads whole rows" in caplog.text


def test_rows_that_share_no_prompt_go_through_the_models_own_attention():
    calls = []

    def watched(*given, **options):
        calls.append(1)
        return sdpa_attention_forward(*given, **options)

    AttentionInterface.register("watched", watched)
    model = tiny_model("llama", layers=1)
    model.config._attn_implementation = "watched"
    policy = Policy(model, pad_id=0)
    policy.measure(ROWS)
    calls.clear()
    policy.measure(ROWS)
    assert not calls
    policy.measure(ROWS[:2])  # of two groups
    assert len(calls) == 1


def test_after_a_forward_without_gradient_the_model_has_its_own_attention():
    model = tiny_model("llama", layers=1)
    policy = Policy(model, pad_id=0)
    with torch.no_grad():
        policy.measure(ROWS)
    assert model.config._attn_implementation == "sdpa"
    assert not Policy(biased_by_distance(), pad_id=0).shares_prompts()


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_the_model_may_be_used_between_a_forward_pass_and_its_backward(kind):
    """Capped scores and sinks are computed there too, which SDPA does not know; padding on the left sees nothing."""
    model = build(kind)
    ids = torch.tensor([[0, 0, 9, 10, 11, 12, 13, 14], [5, 6, 7, 8, 9, 10, 11, 12]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])
    want = model(ids, attention_mask=mask).logits
    written = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    policy = Policy(model, pad_id=0)
    policy.measure(LONG)
    assert model.config._attn_implementation == "covey"
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[mask.bool()], want[mask.bool()])
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False), written)
