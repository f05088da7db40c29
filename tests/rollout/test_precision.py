"""The samplers in 16 bits, beside the learner that computes so, and with changing weights, adapters and hooks."""

from itertools import product

import pytest
import torch
import transformers
from plain_sampling import TEXTS, ids_of, plain_logprobs
from torch.nn import functional as F

from covey.errors import ConfigError
from covey.kernels import add_adapters_inside_products
from covey.kernels.sampler_linear import InPlaceLinear, SamplerLinear, effective, has_bfloat16
from covey.learner.preparation import checkpoint_activations
from covey.rollout import NativeSampler, SamplingParams, TransformersSampler, Unsupported, choose_sampler
from covey.rollout.autocast import AutocastForward
from covey.rollout.decoder import DecoderForward
from covey.rollout.forward import ModulesForward, verify
from covey.rollout.kernel_choice import best_forward
from kit import rest_nightly, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
needs_bfloat16 = pytest.mark.skipif(not has_bfloat16(CPU), reason="this processor has no bfloat16 arithmetic")
FAMILY = ["qwen2", "qwen3", "llama", "mistral"]


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


def adapted(model, **options):
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "v_proj", "o_proj", "down_proj", "up_proj"]
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, lora_alpha=16, **options)
    )


@pytest.mark.parametrize("arch", FAMILY)
def test_the_common_decoders_are_written_out_in_both_precisions(arch):
    model = tiny_model(arch)
    assert isinstance(best_forward(model, "float32"), DecoderForward)
    assert isinstance(best_forward(model, "bfloat16"), DecoderForward)
    assert isinstance(best_forward(model, "float16"), DecoderForward)


@pytest.mark.parametrize("arch", rest_nightly([*FAMILY, "gpt2", "gemma2"], ["qwen3"]))
def test_log_probabilities_in_bfloat16_stay_near_those_in_float32(tokenizer, arch):
    """Rounded to 8 bits, a log-probability is off by a few hundredths at most; at the mean by less than one."""
    model = tiny_model(arch, layers=3, hidden=64, seed=1)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)  # a distribution that is far from flat
    sampler = NativeSampler(model, tokenizer, dtype="bfloat16")
    gaps = []
    for group in sampler.sample(TEXTS, 4, SamplingParams(max_tokens=40, seed=4)):
        for completion, expected in zip(group.completions, plain_logprobs(model, group, SamplingParams()), strict=True):
            gaps.append((completion.logprobs - expected).abs())
    gaps = torch.cat(gaps)
    assert 0 < gaps.mean() < 0.02
    assert gaps.max() < 0.2


@pytest.mark.parametrize(
    "kind, arch, dtype",
    rest_nightly(
        product((NativeSampler, TransformersSampler), ("qwen3", "gpt2", "gemma2", "mistral"), ("bfloat16", "float16")),
        [(NativeSampler, "qwen3", "bfloat16")],
    ),
)
def test_log_probabilities_are_nearer_the_learners_under_autocast_than_float32s_are(tokenizer, kind, arch, dtype):
    """The sampler in the learner's type, beside the sampler in float32: the gap to the learner is less than half as wide."""
    model = tiny_model(arch, layers=3, hidden=64, seed=1)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(6)
    gap = {}
    for precision in (dtype, "float32"):
        found = []
        for group in kind(model, tokenizer, dtype=precision).sample(TEXTS, 4, SamplingParams(max_tokens=20, seed=4)):
            with torch.autocast("cpu", getattr(torch, dtype)):
                learnt = plain_logprobs(model, group, SamplingParams())
            found += [(c.logprobs - e).abs() for c, e in zip(group.completions, learnt, strict=True)]
        gap[precision] = float(torch.cat(found).mean())
    assert gap[dtype] < (0.8 if arch == "gemma2" else 0.5) * gap["float32"]


@pytest.mark.parametrize("arch, kind", [("qwen3", DecoderForward), ("gpt2", AutocastForward)])
def test_a_copy_takes_two_bytes_a_weight_of_its_products_and_nothing_else(arch, kind):
    model = tiny_model(arch, layers=2)
    forward = best_forward(model, "float16")
    assert isinstance(forward, kind)
    of_products = {id(m.weight) for m in model.modules() if type(m).__name__ in ("Linear", "Conv1D")}
    if kind is AutocastForward:
        live = {x.data_ptr() for x in (*model.parameters(), *model.buffers())}
        own = [x for x in (*forward.model.parameters(), *forward.model.buffers()) if x.data_ptr() not in live]
    else:
        products = [*(one for block in forward.blocks for one in block.products), forward.head]
        own = [weight for product in products for weight, _ in product.parts]
    assert {x.dtype for x in own} == {torch.float16}
    assert sum(x.numel() for x in own) == sum(p.numel() for p in model.parameters() if id(p) in of_products)


def test_a_live_embedding_that_is_also_the_output_layer_keeps_both_roles():
    """Rows of the embedding stay exact while the product reads a copy."""
    model = tiny_model("gpt2")
    forward = best_forward(model, "bfloat16")
    assert forward.model.get_input_embeddings().weight is model.get_input_embeddings().weight
    assert forward.model.get_output_embeddings().weight.dtype == torch.bfloat16
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.filterwarnings("ignore:Completions are written by plain transformers")
def test_the_fallback_computes_in_what_was_asked_of_the_engine(tokenizer):
    config = transformers.RwkvConfig(vocab_size=320, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2)
    sampler = choose_sampler(transformers.RwkvForCausalLM(config), tokenizer, dtype="bfloat16")
    assert isinstance(sampler, TransformersSampler)
    assert sampler.dtype == "bfloat16"


def test_an_adapter_that_comes_later_makes_another_forward(tokenizer):
    model = tiny_model("gpt2", layers=2)
    sampler = NativeSampler(model, tokenizer, dtype="bfloat16")
    first = sampler.forward
    sampler.load(model, version=1)
    assert sampler.forward is first, "the same copy, refreshed"
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    sampler.load(adapted, version=2)
    assert sampler.forward is not first


def test_completions_in_bfloat16_follow_their_seed_and_not_the_schedule(tokenizer):
    """Sums of eight bits may fall differently in another batch, so a few completions may part; most do not."""
    model = tiny_model(layers=2, hidden=64, seed=3)
    params = SamplingParams(max_tokens=12, seed=7)
    together = {g.prompt.uid: g for g in NativeSampler(model, tokenizer, dtype="bfloat16").sample(TEXTS, 8, params)}
    waves = {
        g.prompt.uid: g for g in NativeSampler(model, tokenizer, dtype="bfloat16", max_rows=8).sample(TEXTS, 8, params)
    }
    pairs = [
        (a.token_ids.tolist(), b.token_ids.tolist())
        for uid in together
        for a, b in zip(together[uid].completions, waves[uid].completions, strict=True)
    ]
    assert sum(a == b for a, b in pairs) >= 0.8 * len(pairs)


@pytest.mark.parametrize("arch, kind", rest_nightly([("qwen3", DecoderForward), ("gpt2", AutocastForward)], 1))
def test_a_copy_is_made_again_by_every_load(tokenizer, arch, kind):
    model = tiny_model(arch, layers=2)
    sampler = NativeSampler(model, tokenizer, dtype="bfloat16")
    assert isinstance(sampler.forward, kind)
    params = SamplingParams(max_tokens=12, temperature=0)
    before = ids_of(sampler.sample(TEXTS[:1], 1, params))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    sampler.load(model, version=1)
    fresh = NativeSampler(model, tokenizer, dtype="bfloat16")
    assert ids_of(sampler.sample(TEXTS[:1], 1, params)) == ids_of(fresh.sample(TEXTS[:1], 1, params)) != before


def test_adapters_are_added_into_the_copy_and_never_into_live_weights(tokenizer):
    model = adapted(tiny_model(layers=2, seed=5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sampler = NativeSampler(model, tokenizer, dtype="bfloat16")
    assert isinstance(sampler.forward, DecoderForward)
    for group in sampler.sample(TEXTS[:2], 2, SamplingParams(max_tokens=12, seed=2)):
        for completion, expected in zip(group.completions, plain_logprobs(model, group, SamplingParams()), strict=True):
            assert (completion.logprobs - expected).abs().max() < 0.05
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_effective_weight_is_the_layers_own_with_its_active_adapters():
    model = adapted(tiny_model())
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    x = torch.randn(3, layer.in_features)
    weight, bias = effective(layer)
    torch.testing.assert_close(torch.nn.functional.linear(x, weight, bias), layer(x))
    with model.disable_adapter():
        weight, bias = effective(layer)
        torch.testing.assert_close(torch.nn.functional.linear(x, weight, bias), layer(x))


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True, "bias": "none"}])
@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed")
def test_adapters_that_cannot_be_packed_run_in_a_plain_copy(options):
    model = adapted(tiny_model(), **options)
    with pytest.raises(Unsupported, match="variants of LoRA"):
        effective(model.base_model.model.model.layers[0].mlp.down_proj)
    assert isinstance(best_forward(model, "bfloat16"), AutocastForward)
    assert isinstance(best_forward(model, "float32"), ModulesForward)


@pytest.mark.parametrize("arch", FAMILY)
def test_adapters_on_a_16_bit_model_are_added_to_live_weights(arch):
    """As the learner adds them, bit for bit; 7 billion weights have no second copy, and small adapters are not rounded away."""
    model = adapted(tiny_model(arch).to(torch.bfloat16))
    add_adapters_inside_products(model)
    layer = model.base_model.model.model.layers[0]
    forward = best_forward(model, "auto")
    assert isinstance(forward, DecoderForward)
    block, x = forward.blocks[0], torch.randn(5, model.config.hidden_size)
    attention, mlp = layer.self_attn, layer.mlp
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = [projection(x) for projection in (attention.q_proj, attention.k_proj, attention.v_proj)]
        gated = F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    x = x.to(torch.bfloat16)
    assert all(map(torch.equal, block.qkv.split(x, []), expected))
    assert torch.equal(block.qkv(x), torch.cat(expected, -1))
    torch.testing.assert_close(block.gate.gated(block.up, x), gated, rtol=0.02, atol=1e-3)
    pointers = {parameter.data_ptr() for parameter in model.parameters()}
    assert {tensor.data_ptr() for tensor in block.qkv.base.tensors if tensor is not None} <= pointers
    verify(forward, model)
    key = forward.capture_key()
    with model.disable_adapter():
        assert forward.refresh()
        torch.testing.assert_close(forward.blocks[0].qkv.split(x, [])[0], attention.q_proj.base_layer(x))
        assert forward.capture_key() != key


def test_a_step_that_was_captured_reads_adapters_that_were_trained_since():
    model = adapted(tiny_model().to(torch.bfloat16))
    forward = best_forward(model, "auto")
    key, block, x = forward.capture_key(), forward.blocks[0], torch.randn(5, 32).to(torch.bfloat16)
    before = block.qkv(x)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(3 if "lora_B" in name else 1)
    assert forward.refresh()
    assert forward.capture_key() == key
    base, after = block.qkv.base(x), block.qkv(x)
    torch.testing.assert_close((after - base).float(), 3 * (before - base).float(), rtol=0.05, atol=0.05)
    assert torch.equal(after, forward.blocks[0].qkv(x))


def test_a_captured_step_is_of_one_scale_of_the_adapters():
    model = adapted(tiny_model().to(torch.bfloat16))
    forward = best_forward(model, "auto")
    key = forward.capture_key()
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)
    assert forward.refresh()
    assert forward.capture_key() != key


def test_adapters_in_float32_are_added_to_live_weights():
    model = adapted(tiny_model())
    forward = best_forward(model, "float32")
    assert isinstance(forward, DecoderForward)
    x = torch.randn(5, model.config.hidden_size)
    attention = model.base_model.model.model.layers[0].self_attn
    with torch.no_grad():
        expected = [projection(x) for projection in (attention.q_proj, attention.k_proj, attention.v_proj)]
    torch.testing.assert_close(list(forward.blocks[0].qkv.split(x, [])), expected)
    pointers = {parameter.data_ptr() for parameter in model.parameters()}
    assert {tensor.data_ptr() for tensor in forward.blocks[0].qkv.base.tensors if tensor is not None} <= pointers
    verify(forward, model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["IA3", "AdaLora"])
def test_adapters_that_are_no_lora_are_computed_by_the_modules(kind, dtype):
    peft = pytest.importorskip("peft")
    options = {"feedforward_modules": ["down_proj"], "init_ia3_weights": False} if kind == "IA3" else {"total_step": 10}
    config = getattr(peft, f"{kind}Config")(target_modules=["k_proj", "down_proj"], **options)
    model = peft.get_peft_model(tiny_model().to(getattr(torch, dtype)), config)
    assert isinstance(best_forward(model, dtype), ModulesForward)


def test_a_model_with_hooks_is_run_by_its_modules_even_when_they_come_later(tokenizer):
    model = tiny_model()
    sampler = NativeSampler(model, tokenizer, dtype="float32")
    assert isinstance(sampler.forward, DecoderForward)
    seen = []
    handle = model.model.layers[0].register_forward_hook(lambda *args: seen.append(1))
    sampler.load(model, version=1)
    list(sampler.sample(["a"], 1, SamplingParams(max_tokens=2)))
    handle.remove()
    assert isinstance(sampler.forward, ModulesForward)
    assert seen


def test_gradient_checkpointing_hangs_a_hook_on_embeddings_that_changes_no_number(tokenizer):
    model = tiny_model()
    checkpoint_activations(model)
    assert model.get_input_embeddings()._forward_hooks
    assert isinstance(best_forward(model, "float32"), DecoderForward)


def test_auto_is_exact_for_a_tiny_model():
    assert best_forward(tiny_model(), "auto").dtype == torch.float32


@needs_bfloat16
def test_auto_takes_bfloat16_for_a_larger_one():
    model = tiny_model(hidden=256, vocab_size=20_000)
    assert best_forward(model, "auto").dtype == torch.bfloat16


@needs_bfloat16
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_equals_the_plain_one_to_bfloat16(bias):
    layers = [torch.nn.Linear(48, size, bias=bias) for size in (32, 80)]
    x = torch.randn(5, 48)
    packed, live = SamplerLinear.make(*layers, dtype=torch.bfloat16), InPlaceLinear.of(*layers)
    half = x.bfloat16()
    close = {"atol": 0.02, "rtol": 0.02}
    torch.testing.assert_close(packed(half).float(), live(x), **close)
    torch.testing.assert_close(packed.silu(half).float(), live.silu(x), **close)
    factor = torch.randn(5, 112)
    torch.testing.assert_close(packed.times(half, factor.bfloat16()).float(), live.times(x, factor.clone()), **close)
    torch.testing.assert_close(live(x), torch.cat([layer(x) for layer in layers], -1))


def test_a_precision_that_does_not_exist_is_refused(tokenizer):
    for kind in (NativeSampler, TransformersSampler):
        with pytest.raises(ConfigError, match="float8"):
            kind(tiny_model(), tokenizer, dtype="float8")


def test_a_half_precision_model_is_not_sampled_from_in_float32(tokenizer):
    for kind in (NativeSampler, TransformersSampler):
        with pytest.raises(ConfigError, match="in bfloat16: leave rollout_dtype out"):
            kind(tiny_model(dtype=torch.bfloat16), tokenizer, dtype="float32")


def test_a_half_precision_model_runs_in_its_own_precision(tokenizer):
    model = tiny_model(dtype=torch.bfloat16, layers=2)
    (group,) = NativeSampler(model, tokenizer).sample(["a"], 2, SamplingParams(max_tokens=8, seed=1))
    expected = plain_logprobs(model, group, SamplingParams())
    assert max((c.logprobs - e).abs().max() for c, e in zip(group.completions, expected, strict=True)) < 0.1


@pytest.mark.parametrize("arch", ["gpt2", "gemma2"])
def test_an_output_layer_in_float32_has_the_new_weights_between_two_tokens(tokenizer, arch):
    model, steps = tiny_model(arch, dtype=torch.bfloat16, tie_word_embeddings=False), []

    def between_tokens():
        steps.append(None)
        if len(steps) == 4:  # three tokens are written
            with torch.no_grad():
                model.get_output_embeddings().weight.zero_()
            sampler.change_weights(1)

    sampler = NativeSampler(
        model, tokenizer, dtype="bfloat16", float32_head=True, eos_ids=[], check_stop=between_tokens
    )
    ((completion,),) = (group.completions for group in sampler.sample(["a"], 1, SamplingParams(max_tokens=6, seed=0)))
    alike = torch.full((3,), -torch.tensor(320.0).log())
    torch.testing.assert_close(completion.logprobs[3:], alike)
    assert not torch.allclose(completion.logprobs[:3], alike, atol=1e-3)


def test_an_output_layer_in_float32_reads_the_live_weights_not_the_copy():
    model = tiny_model("gpt2")
    forward = best_forward(model, "bfloat16", float32_head=True)
    assert isinstance(forward, AutocastForward)
    with forward.evaluating():
        assert forward.head.tensors[0].data_ptr() == model.get_output_embeddings().weight.data_ptr()
