"""Weights that vLLM gets of a policy with an adapter, on a base in any type: a plain model of them computes as the policy, or it is refused."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from fake_server import FakeServer, nudged

from covey.adapters import with_adapter
from covey.errors import ConfigError
from covey.rollout import SamplingParams
from covey.rollout.agreement import plain_logprobs
from covey.rollout.vllm import ServerSampler
from covey.rollout.vllm.plain_layers import plain_config, refuse_unmerged
from covey.rollout.vllm.weights import distinct_weights, why_not_alone
from kit import rest_nightly, tiny_model, tiny_tokenizer

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # what PEFT and bitsandbytes say of such adapters, and of a CPU
IDS = torch.arange(3, 20)[None]
TARGETS = ["q_proj", "v_proj"]
UNTIED = {"tie_word_embeddings": False}


def lora(**changed):
    return peft.LoraConfig(**{"r": 4, "target_modules": TARGETS, **changed})


def policy_of(config, **shape):
    """A policy whose adapter and other trained weights have moved, and the base that it began with."""
    model = tiny_model("qwen2", layers=2, **shape)
    base = copy.deepcopy(model)
    torch.manual_seed(0)
    policy = with_adapter(model, config)
    with torch.no_grad():
        for weight in (weight for weight in policy.parameters() if weight.requires_grad):
            weight.add_(torch.randn_like(weight) * 0.1)
    return policy.eval(), base


@torch.no_grad()
def logits_of_plain(policy, kind):
    """Logits of a plain model with the weights that a server gets."""
    weights = dict(distinct_weights(policy, torch.float32))
    plain = kind.from_pretrained(None, config=plain_config(policy), state_dict=weights, dtype=torch.float32)
    assert plain.state_dict().keys() >= weights.keys()
    return plain.eval()(input_ids=IDS).logits


def expect_equal(policy, base):
    refuse_unmerged(policy)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    with torch.no_grad():
        theirs, start = policy(input_ids=IDS).logits, base.eval()(input_ids=IDS).logits
    assert (theirs - start).abs().max() > 1e-3
    torch.testing.assert_close(logits_of_plain(policy, type(base)), theirs, atol=2e-6, rtol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert not any(getattr(layer, "merged", False) for layer in policy.modules())


ADAPTERS = {
    "LoRA": ({}, {}),
    "rsLoRA": ({"use_rslora": True}, {}),
    "ranks": ({"rank_pattern": {"v_proj": 8}}, {}),
    "DoRA": ({"use_dora": True}, {}),
    "PiSSA": ({"init_lora_weights": "pissa"}, {}),
    "biases": ({"bias": "all"}, {}),
    "bias of LoRA": ({"lora_bias": True}, {}),
    "trained norms": ({"modules_to_save": ["norm"]}, {}),
    "trained head": ({"modules_to_save": ["lm_head"]}, UNTIED),
    "trained embeddings": ({"modules_to_save": ["embed_tokens"]}, UNTIED),
    "trained tied embeddings": ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, {}),
    "tokens": ({"trainable_token_indices": [3, 4, 5, 6]}, {}),
    "tokens of untied embeddings": ({"trainable_token_indices": [3, 4, 5, 6]}, UNTIED),
    "embeddings": ({"target_modules": ["embed_tokens", "q_proj"]}, UNTIED),
    "embeddings by DoRA": ({"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}, UNTIED),
    "head": ({"target_modules": ["lm_head", "q_proj"]}, UNTIED),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_model_of_the_weights_that_vllm_gets_computes_as_the_policy(name):
    options, shape = ADAPTERS[name]
    expect_equal(*policy_of(lora(**options), **shape))


KINDS = {
    "IA3Config": {"target_modules": [*TARGETS, "down_proj"], "feedforward_modules": ["down_proj"]},
    "LoHaConfig": {"r": 4, "target_modules": TARGETS},
    "OFTConfig": {"oft_block_size": 8, "target_modules": TARGETS},
    "HRAConfig": {"r": 4, "target_modules": TARGETS},
    "VeraConfig": {"r": 4, "target_modules": TARGETS},
    "LNTuningConfig": {"target_modules": ["norm", "input_layernorm"]},
}


@pytest.mark.parametrize("kind", rest_nightly(KINDS, 2))
def test_an_adapter_of_another_kind_is_merged_as_peft_merges_it(kind):
    expect_equal(*policy_of(getattr(peft, kind)(**KINDS[kind])))


TIED = "model.embed_tokens.weight and lm_head.weight alike, and they are one tied weight"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (lora(modules_to_save=["lm_head"]), TIED),
        (lora(modules_to_save=["embed_tokens"]), TIED),
        (lora(target_modules=["lm_head", "q_proj"]), TIED),
        (lora(target_modules=["embed_tokens", "q_proj"]), TIED),
        (lora(layer_replication=[[0, 2], [0, 2]]), "one tied weight to vLLM"),
        (peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "no part of the model's weights"),
        (peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "no part of the model's weights"),
    ],
)
def test_a_policy_that_no_plain_weights_equal_is_refused_in_a_sentence(config, why, tmp_path):
    model = tiny_model("qwen2", layers=2)
    with FakeServer(model, tiny_tokenizer(), has_digest=True, lora_rank=2) as fake:
        policy = with_adapter(model, config)
        with pytest.raises(ConfigError, match=why):
            ServerSampler(policy, tiny_tokenizer(), port=fake.port, directory=tmp_path, eos_ids=[2])
    assert fake.calls.count("/v1/completions") <= 2  # of the vocabulary's last token


def test_what_peft_cannot_merge_is_refused_in_a_sentence():
    policy, _ = policy_of(lora(lora_bias=True, target_modules=["o_proj"]))  # a layer without a bias of its own
    with pytest.raises(ConfigError, match=r"adapter on model\.layers\.0\.self_attn\.o_proj cannot be merged .*no bias"):
        list(distinct_weights(policy, torch.float32))


@pytest.mark.parametrize(
    "changed", [{"lora_bias": True}, {"trainable_token_indices": [3, 4]}, {"modules_to_save": ["norm"]}]
)
def test_what_is_no_lora_of_a_linear_layer_does_not_travel_alone(changed):
    policy, _ = policy_of(lora(**changed))
    assert "which is no LoRA of a linear layer" in why_not_alone(policy, 64, 1)
    assert why_not_alone(policy_of(lora(rank_pattern={"v_proj": 8}))[0], 64, 1) is None


def test_of_a_server_without_adapters_the_command_of_one_is_named():
    policy, _ = policy_of(lora(rank_pattern={"v_proj": 8}))
    assert "covey serve-vllm MODEL --lora-rank 8 starts one" in why_not_alone(policy, 0, 1)


def test_what_a_server_would_scale_or_choose_otherwise_does_not_travel_alone():
    """It reads the configuration of the one adapter that it is sent."""
    policy, base = policy_of(lora())
    policy.base_model.model.model.layers[0].self_attn.q_proj.set_scale("default", 0.5)
    assert "scaled otherwise" in why_not_alone(policy, 64, 1)
    expect_equal(policy, base)
    policy, base = policy_of(lora())
    policy.add_adapter("second", lora(init_lora_weights=False))
    policy.base_model.set_adapter(["default", "second"])
    assert "several adapters" in why_not_alone(policy, 64, 1)
    expect_equal(policy, base)


@pytest.mark.parametrize("is_moved", [False, True])
def test_an_adapter_travels_alone_to_a_server_that_has_its_base(is_moved, tmp_path, caplog):
    """Another run may have replaced it, by too little for the probe."""
    policy, base = policy_of(lora())
    if is_moved:
        nudged(base, by=0.01)
    with FakeServer(base, tiny_tokenizer(), has_digest=True, lora_rank=8) as fake:
        sampler = ServerSampler(policy, tiny_tokenizer(), port=fake.port, directory=tmp_path, eos_ids=[2])
        (group,) = sampler.sample(["2 + 2 ="], 1, SamplingParams(max_tokens=6))
        (expected,) = plain_logprobs(policy, [group])
    torch.testing.assert_close(group.completions[0].logprobs, expected, atol=1e-5, rtol=0)
    assert ("its base weights are not this run's" in caplog.text) == is_moved
    assert ("/v1/load_lora_adapter" in fake.calls) != is_moved


@pytest.mark.parametrize(
    "before, name, why",
    [
        ("nothing", "policy", None),
        ("adapter", "policy", None),
        ("whole", "policy", r"it has the whole weights of run-\w+:0, which cannot be compared with this run's base"),
        (
            "nothing",
            "policy-Instruct",
            "it was started with policy, which cannot be compared with this run's policy-Instruct",
        ),
    ],
)
def test_an_adapter_travels_alone_without_digests_where_nothing_speaks_for_another_base(
    before, name, why, tmp_path, caplog
):
    """As on several GPUs, whose digests are of parts. A run before may have left its weights, too near for the probe to tell."""
    policy, base = policy_of(lora())
    base.config._name_or_path = policy.base_model.model.config._name_or_path = f"hub/{name}"
    with FakeServer(base, tiny_tokenizer(), lora_rank=8) as fake:
        fake.device = "cuda"
        how = {"port": fake.port, "directory": tmp_path, "eos_ids": [2]}
        earlier = {"nothing": None, "adapter": policy, "whole": tiny_model("qwen2", layers=2)}[before]
        if earlier is not None:
            list(ServerSampler(earlier, tiny_tokenizer(), **how).sample(["2 + 2 ="], 1, SamplingParams(max_tokens=2)))
        caplog.clear()
        caplog.set_level("INFO")
        sampler = ServerSampler(policy, tiny_tokenizer(), **how)
        (group,) = sampler.sample(["2 + 2 ="], 1, SamplingParams(max_tokens=6))
        (expected,) = plain_logprobs(policy, [group])
    torch.testing.assert_close(group.completions[0].logprobs, expected, atol=1e-5, rtol=0)
    assert re.search(f"instead of the adapter alone: {why}" if why else "The adapter alone travels", caplog.text)


@pytest.mark.parametrize("name", ["s", "self", "base"])
def test_an_adapter_travels_alone_whatever_its_name(name):
    """Names of modules begin with these."""
    assert why_not_alone(peft.get_peft_model(tiny_model("qwen2", layers=2), lora(), adapter_name=name), 64, 1) is None


def test_a_layer_that_another_adapter_holds_is_the_bases():
    policy, base = policy_of(lora(modules_to_save=["norm"]))
    policy.add_adapter("second", lora(init_lora_weights=False))
    policy.set_adapter("second")
    expect_equal(policy, base)


def test_a_base_of_another_quantization_is_refused_in_a_sentence():
    from transformers.utils.quantization_config import QuantizationMethod

    model = tiny_model("qwen2")
    model.is_quantized, model.quantization_method = True, QuantizationMethod.GPTQ
    with pytest.raises(ConfigError, match="cannot be handed a base that is quantized by gptq"):
        refuse_unmerged(with_adapter(model, lora()))


# -- quantized bases ----------------------------------------------------------------------------------------------------


def quantized(folder, config, **options):
    """A policy on a base that bitsandbytes has quantized, in training mode: in the other it packs weights on a CPU."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("bitsandbytes")
        model = tiny_model("qwen2", layers=2, hidden=64)
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=BitsAndBytesConfig(**options), dtype=torch.float32
        )
    for module in loaded.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    torch.manual_seed(0)
    return with_adapter(loaded, config).train(), model


IN_4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
IN_8 = {"load_in_8bit": True}


@pytest.mark.parametrize(
    ("options", "changed", "atol"),
    [
        pytest.param(IN_4, {}, 2e-6, id="4 bits"),
        pytest.param(
            {**IN_4, "bnb_4bit_use_double_quant": True}, {}, 2e-6, id="4 bits, scales in 8", marks=pytest.mark.nightly
        ),
        pytest.param(IN_4, {"use_dora": True}, 2e-6, id="4 bits, DoRA"),
        pytest.param(IN_4, {"modules_to_save": ["norm"]}, 2e-6, id="4 bits, trained norms", marks=pytest.mark.nightly),
        pytest.param(IN_8, {}, 5e-3, id="8 bits"),  # its product rounds activations to 8 bits too
    ],
)
def test_a_quantized_base_is_sent_as_its_products_read_it(options, changed, atol, tmp_path):
    policy, base = quantized(tmp_path, lora(init_lora_weights=False, **changed), **options)
    refuse_unmerged(policy)
    assert policy.get_base_model().quantization_method.value == "bitsandbytes"
    with torch.no_grad():
        theirs, whole = policy(input_ids=IDS).logits, base.eval()(input_ids=IDS).logits
    assert (theirs - whole).abs().max() > 4 * atol
    ours = logits_of_plain(policy, type(base))
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=1e-5)
    assert not hasattr(plain_config(policy), "quantization_config")


def test_a_quantized_base_reaches_a_server_that_takes_no_adapter(tmp_path):
    policy, base = quantized(tmp_path / "model", lora(init_lora_weights=False), **IN_4)
    with FakeServer(base, tiny_tokenizer(), has_digest=True) as fake:
        sampler = ServerSampler(
            policy, tiny_tokenizer(), port=fake.port, directory=tmp_path / "w", eos_ids=[2], attest="off"
        )
        sampler._settle()  # its own forward in evaluation mode is packed on a CPU, so that there is nothing to attest by
        with torch.no_grad():
            theirs = fake.replicas[0](input_ids=IDS).logits
            torch.testing.assert_close(theirs, policy.train()(input_ids=IDS).logits, atol=2e-6, rtol=1e-5)
