"""LoRA on fused experts: sampler, learner, merging, servers and files see the same model as plain PEFT."""

from __future__ import annotations

import copy
import logging
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from safetensors.torch import load_file
from shared_rows import ROWS, gradients

from covey import GRPOConfig, GRPOTrainer
from covey.adapters import expert_parameters, with_adapter, with_saved_adapter
from covey.cli import main
from covey.errors import ConfigError
from covey.learner.packing import unscored_row
from covey.learner.policy import Policy
from covey.merging import merge_adapters
from covey.models.merging.adapters import weights_on_same_base
from covey.rollout import NativeSampler, SamplingParams
from covey.rollout.vllm.weights import Source, write_weights
from covey.serving.loading import with_merged_adapter
from covey.types import Prompt
from expert_models import DENSE, FAMILIES, expert_model, with_adapted_experts
from kit import rest_nightly, tiny_tokenizer

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
IDS = torch.tensor([[5, 6, 7, 8, 9, 11]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize(
    "family, dtype, largest",
    rest_nightly([(family, torch.float32, 1e-5) for family in FAMILIES], 1)
    + rest_nightly([(family, torch.bfloat16, 0.03) for family in FAMILIES], [("GptOss", torch.bfloat16, 0.03)]),
)
def test_the_sampler_draws_with_the_adapter_on_the_experts(family, dtype, largest):
    model = expert_model(family, dtype)
    before = logits(model)
    adapted = with_adapted_experts(model)
    assert (logits(adapted) - before).abs().max() > 0.1, "the adapter must be seen"
    sampler, policy = NativeSampler(adapted, tiny_tokenizer(), dtype="auto"), Policy(adapted, pad_id=0)
    prompts = [Prompt(uid=str(i), token_ids=tuple(range(5 + i, 9 + 4 * i))) for i in range(3)]
    groups = list(sampler.sample(prompts, 3, SamplingParams(max_tokens=8, seed=0)))
    assert policy.shares_prompts()
    for group in groups:
        with torch.no_grad():
            mine = policy.measure([unscored_row(group.prompt, drawn) for drawn in group.completions]).logp
        for row, drawn in zip(mine, group.completions, strict=True):
            assert drawn.logprobs is not None
            assert (row[: drawn.num_tokens] - drawn.logprobs).abs().max() < largest


def plain_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients of `shared_rows.gradients` by PEFT and transformers alone, one row at a time."""
    model.zero_grad()
    for row in ROWS:
        ids = torch.tensor([[*row.prompt.token_ids, *row.completion.token_ids.tolist()]])
        logp = model(input_ids=ids).logits[0, len(row.prompt.token_ids) - 1 : -1].float().log_softmax(-1)
        drawn = logp.gather(-1, row.completion.token_ids[:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        (drawn * (0.7 * torch.arange(len(drawn)) - 1) + 0.3 * entropy).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", rest_nightly(FAMILIES, ["Qwen3Moe", "GptOss"]))
def test_gradients_of_the_factors_are_those_of_plain_peft(family):
    adapted = with_adapted_experts(expert_model(family))
    plain = plain_gradients(adapted)
    _, packed = gradients(Policy(adapted, pad_id=0), [ROWS])
    assert packed.keys() == plain.keys()
    assert any(".experts." in name for name in plain)
    for name, gradient in plain.items():
        assert (packed[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_server_gets_the_experts_with_the_adapter_under_the_names_of_a_checkpoint(family, tmp_path):
    adapted = with_adapted_experts(expert_model(family))
    write_weights(Source(adapted), tmp_path / "sent", torch.float32)
    copy.deepcopy(adapted).merge_and_unload().save_pretrained(tmp_path / "saved")
    sent, saved = (weights_in(tmp_path / name) for name in ("sent", "saved"))
    assert sent.keys() == saved.keys()
    for name, weight in saved.items():
        torch.testing.assert_close(sent[name], weight, rtol=0, atol=1e-6)


def test_merged_copies_in_16_bits_reach_a_server_all(tmp_path):
    """A copy that is freed leaves its address to the next one, which is no tied weight."""
    adapted = with_adapted_experts(expert_model("GptOss"))
    write_weights(Source(adapted), tmp_path / "sent", torch.bfloat16)
    sent = weights_in(tmp_path / "sent")
    tied = {"lm_head.weight"}
    assert sent.keys() == expert_model("GptOss").state_dict().keys() - tied


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}


def saved_pair(family: str, place: Path) -> tuple[Any, Any]:
    """Two adapters on one base, in `place/a` and `place/b`."""
    expert_model(family).save_pretrained(place / "base")
    pair = [with_adapted_experts(loaded(family, place), seed=seed) for seed in (1, 2)]
    for adapted, name in zip(pair, "ab", strict=True):
        adapted.peft_config["default"].base_model_name_or_path = str(place / "base")
        adapted.save_pretrained(place / name)
    return pair[0], pair[1]


def loaded(family: str, place: Path) -> Any:
    return getattr(transformers, f"{family}ForCausalLM").from_pretrained(place / "base")


def deltas(adapted: Any) -> dict[str, torch.Tensor]:
    return {
        name: layer.get_delta_weight("default").detach()
        for name, layer in adapted.named_modules()
        if hasattr(layer, "get_delta_weight")
    }


@pytest.mark.parametrize("family", rest_nightly(["Qwen3Moe", "GptOss"], ["GptOss"]))
def test_adapters_of_experts_are_merged_loaded_served_and_widened_expert_by_expert(family, tmp_path):
    first, second = saved_pair(family, tmp_path)
    wanted = logits(first)
    torch.testing.assert_close(logits(with_saved_adapter(loaded(family, tmp_path), tmp_path / "a")), wanted)
    torch.testing.assert_close(logits(with_merged_adapter(loaded(family, tmp_path), tmp_path / "a")), wanted)

    merge_adapters([tmp_path / "a", tmp_path / "b"], tmp_path / "mean")
    mean = deltas(with_saved_adapter(loaded(family, tmp_path), tmp_path / "mean"))
    for name, delta in deltas(first).items():
        torch.testing.assert_close(mean[name], (delta + deltas(second)[name]) / 2)
    assert merge_adapters([tmp_path / "a", tmp_path / "a"], tmp_path / "low", rank=4) < 1e-5
    low = deltas(with_saved_adapter(loaded(family, tmp_path), tmp_path / "low"))
    torch.testing.assert_close(low, deltas(first), rtol=1e-4, atol=1e-5)

    wide = with_adapted_experts(loaded(family, tmp_path), rank=8, seed=3)
    wide.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    fitted = weights_on_same_base(wide, tmp_path / "a")
    assert fitted is not None
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            if name in fitted:
                parameter.copy_(fitted[name])
    torch.testing.assert_close(logits(wide), wanted)


def notes_on(caplog: Any, family: str, targets: Any, **options: Any) -> list[str]:
    """Warnings about an adapter on this model, which may adapt further parameters."""
    parameters = options.pop("target_parameters", None)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "covey.adapters"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own, which name no layer
        adapter = peft.LoraConfig(r=2, target_modules=targets, target_parameters=parameters)
        with_adapter(expert_model(family, **options), adapter)
    return [record.getMessage() for record in caplog.records if record.name == "covey.adapters"]


def test_all_linear_says_once_that_experts_are_no_linear_layers(caplog):
    (note,) = notes_on(caplog, "GptOss", "all-linear")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert f"add target_parameters={targets} (--lora-target-parameters)" in note
    assert not notes_on(caplog, "GptOss", "all-linear", target_parameters=targets)
    assert not notes_on(caplog, "GptOss", ["q_proj", "v_proj"])


def test_dense_layers_that_peft_takes_for_experts_are_named(caplog):
    """PEFT 0.21 turns `gate_proj` of these families into parameters of experts, with none left for a dense layer."""
    for family, options in DENSE.values():
        (note,) = notes_on(caplog, family, "all-linear", **options)
        assert "mlp.down_proj, mlp.gate_proj, mlp.up_proj, whose names PEFT reads as those of experts" in note
    (note,) = notes_on(caplog, "DeepseekV3", "all-linear")
    assert "mlp.gate_proj" in note
    assert "mlp.shared_experts.gate_proj" in note
    assert "target_parameters" not in note


def test_a_layer_that_no_module_is_called_is_named(caplog):
    (note,) = notes_on(caplog, "GraniteMoe", ["q_proj", "gate_proj"])
    assert "gate_proj, which is in no layer's name (its experts are target_parameters=['block_sparse_moe" in note


def test_a_parameter_that_is_not_there_is_refused_with_those_that_are():
    adapter = peft.LoraConfig(r=2, target_modules="all-linear", target_parameters=["mlp.experts.up_proj"])
    with pytest.raises(ConfigError, match=r"'mlp\.experts\.up_proj'.*its experts are mlp\.experts\.gate_up_proj, mlp"):
        with_adapter(expert_model("Qwen3Moe"), adapter)
    with pytest.raises(ConfigError, match="it has no experts"):
        with_adapter(expert_model("Qwen3Moe", mlp_only_layers=[0, 1]), adapter)


PATTERNS: dict[str, dict[str, Any]] = {
    "a rank of its own": {"rank_pattern": {"gate_up_proj": 2}},
    "a scale of its own": {"alpha_pattern": {"experts.down_proj": 32}},
    "a layer of its own": {"alpha_pattern": {"down_proj": 32, r"layers\.1\..*down_proj": 2}},
    "two entries for one parameter": {"rank_pattern": {"gate_up_proj": 2, "experts.gate_up_proj": 3}},
    "rslora": {"use_rslora": True, "lora_alpha": 16},
    "linear layers": {"target_modules": ["q_proj"], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 32}},
    "all linear layers": {"target_modules": "all-linear", "rank_pattern": {"gate_up_proj": 2, "q_proj": 3}},
}


@pytest.mark.parametrize(
    "family, pattern",
    rest_nightly(
        product(["Qwen3Moe", "GptOss", "DeepseekV3", "GraniteMoe", "Mixtral", "Olmoe"], PATTERNS),
        [("Qwen3Moe", "a rank of its own"), ("GptOss", "two entries for one parameter")],
    ),
)
def test_ranks_and_scales_of_experts_are_the_same_merged_and_loaded(family, pattern, tmp_path):
    options = PATTERNS[pattern]
    tokenizer = tiny_tokenizer()
    expert_model(family, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")

    def adapted(**options: Any) -> Any:
        base = loaded(family, tmp_path)
        settings = {"target_modules": [], "target_parameters": expert_parameters(base), **options}
        model = with_adapter(base, peft.LoraConfig(r=4, **settings))
        for i, parameter in enumerate(p for n, p in model.named_parameters() if ".lora_" in n):
            size = parameter.numel()
            parameter.data = 0.3 * torch.sin(i + torch.arange(size, dtype=torch.float32)).view(parameter.shape)
        return model

    model = adapted(**options)
    wanted = logits(model)
    assert (wanted - logits(adapted())).abs().max() > 1e-2, "the options must be seen"
    assert (wanted - logits(loaded(family, tmp_path))).abs().max() > 1e-2
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(with_saved_adapter(loaded(family, tmp_path), tmp_path / "adapter")), wanted)
    assert not main(["export", str(tmp_path / "adapter"), "--format", "merged", "-o", str(tmp_path / "merged")])
    merged = getattr(transformers, f"{family}ForCausalLM").from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), wanted, rtol=0, atol=1e-5)


def test_what_does_not_go_with_experts_is_one_sentence():
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    for option in ({"use_dora": True}, {"lora_dropout": 0.1}, {"lora_bias": True}):
        adapter = peft.LoraConfig(r=2, target_modules=[], target_parameters=targets, **option)
        sentence = (
            rf"peft_config: {next(iter(option))} does not go with an adapter on experts \(mlp\.experts\.gate_up_proj, "
        )
        with pytest.raises(ConfigError, match=sentence):
            with_adapter(expert_model("Qwen3Moe"), adapter)


@pytest.mark.slow
def test_a_run_trains_the_experts_adapter_and_saves_it(tmp_path):
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    tokenizer = tiny_tokenizer()
    model = expert_model("Qwen3Moe", vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "base")
    options: dict[str, Any] = {
        **{"output_dir": str(tmp_path / "run"), "max_steps": 2, "learning_rate": 1e-2, "beta": 0.0, "bf16": False},
        **{"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "save_strategy": "no"},
    }
    trainer = GRPOTrainer(
        model=str(tmp_path / "base"),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=GRPOConfig(**options),
        train_dataset=Dataset.from_dict({"prompt": ["Tom has 3 apples", "What is 12"]}),
        peft_config=peft.LoraConfig(r=2, target_modules=[], target_parameters=targets),
    )
    trainer.train()
    moved = deltas(trainer.model)
    assert moved
    assert all(bool(delta.abs().max() > 0) for delta in moved.values())
    trainer.save_model(str(tmp_path / "adapter"))
    again = with_saved_adapter(loaded("Qwen3Moe", tmp_path), tmp_path / "adapter")
    torch.testing.assert_close(logits(again), logits(trainer.model))
