"""Experts that vLLM 0.32's CPU build packs once, where it makes their kernel, and not at a reload: packed anew with every update."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fake_server import nudged
from real_server import Running

from covey.rollout import SamplingParams
from covey.rollout.agreement import plain_logprobs
from covey.rollout.vllm import ServerSampler
from covey.rollout.vllm.worker.covey_worker import reload
from expert_models import expert_model
from kit import tiny_tokenizer

PROMPTS = ["Tom has 3 apples.", "12 + 30 ="]


class Packing:
    """vLLM's `UnquantizedFusedMoEMethod` on a CPU. Its kernel computes with the values in reverse."""

    unquantized_backend = "CPU"

    def __init__(self) -> None:
        self.moe_kernel = None

    def process_weights_after_loading(self, layer):
        if self.moe_kernel is None:
            self.moe_kernel = object()
            layer.weight.data = layer.weight.data.flip(0)


def worker_of(device, *layers):
    """A worker whose `reload_weights` loads the weights of some layers, as vLLM's does."""
    model = torch.nn.Sequential(*layers)

    def reload_weights(weights_iterator, is_checkpoint_format):
        for name, weight in weights_iterator:
            layer = model[int(name)]
            layer.weight.data = weight.clone()
            layer.quant_method.process_weights_after_loading(layer)

    runner = SimpleNamespace(get_model=lambda: model)
    return SimpleNamespace(model_runner=runner, device=torch.device(device), reload_weights=reload_weights)


def experts():
    layer = torch.nn.Linear(2, 3, bias=False)
    layer.quant_method = Packing()
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def test_experts_that_are_loaded_are_packed_anew_and_the_others_keep_their_kernel():
    loaded, other = experts(), experts()
    kernel, kept = other.quant_method.moe_kernel, other.weight.clone()
    weight = torch.arange(6.0).reshape(3, 2)
    for _ in range(2):
        reload(worker_of("cpu", loaded, other, torch.nn.Linear(2, 2)), weights_iterator=[("0", weight)])
        assert torch.equal(loaded.weight, weight.flip(0))
        assert loaded.quant_method.moe_kernel is not None
        assert other.quant_method.moe_kernel is kernel
        assert torch.equal(other.weight, kept)


def test_the_kernel_of_experts_on_a_gpu_stays_as_captured_graphs_know_it():
    loaded = experts()
    kernel = loaded.quant_method.moe_kernel
    reload(worker_of("cuda", loaded), weights_iterator=[("0", torch.ones(3, 2))])
    assert loaded.quant_method.moe_kernel is kernel


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("width", [40, 32], ids=["padded", "whole"])
def test_what_a_real_server_draws_has_the_log_probabilities_of_the_trainers_experts(width, tmp_path):
    """vLLM's CPU kernels take experts whose width is a multiple of 32; others are padded."""
    tokenizer = tiny_tokenizer()
    shape = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": width, "vocab_size": len(tokenizer)}
    model = expert_model("Qwen3Moe", **shape)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    running = Running(tmp_path, str(tmp_path / "base"), lora_rank=None)
    try:
        for transport in ("directory", "ipc"):
            sampler = ServerSampler(
                model, tokenizer, port=running.port, directory=tmp_path / "weights", transport=transport
            )
            expect_near(sampler, model)
            for version, part in enumerate(("experts", "self_attn", ""), 1):
                changed = [weight for name, weight in model.named_parameters() if part in name]
                nudged(torch.nn.ParameterList(changed), by=0.03, seed=version)
                sampler.load(model, version)
                expect_near(sampler, model)
                assert sampler.take_metrics()["vllm/exact"].value == 1
    finally:
        running.stop()


def expect_near(sampler, model):
    groups = list(sampler.sample(PROMPTS, 4, SamplingParams(max_tokens=12)))
    completions = [one for group in groups for one in group.completions]
    apart = [
        float((one.logprobs - mine).abs().max())
        for one, mine in zip(completions, plain_logprobs(model, groups), strict=True)
    ]
    assert len(apart) == 8
    assert max(apart) < 1e-4
