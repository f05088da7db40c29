"""A plan for GPUs that are not here: the roofline by hand, published models, and what splitting divides."""

import math
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from covey.doctor.layers import shortened
from covey.doctor.roofline.answers import answers
from covey.doctor.roofline.estimate import Setup, TimedBytes, estimate
from covey.doctor.roofline.gpus import GPUS, HOST_LINK, LINKS, NETWORK, PRODUCTS, READS, gpus
from covey.doctor.roofline.options import MODELS, config_by_name, planned
from covey.doctor.roofline.rollout import A_KERNEL, LAUNCHED, Decoding, kernels_of, rate_of
from covey.errors import ConfigError
from kit import rest_nightly, tiny_model

H100 = GPUS["H100"]


@pytest.mark.parametrize("text, count, name", [("8xH100", 8, "H100"), ("h100", 1, "H100"), ("2 x a100-40gb", 2, "A100-40GB"),
                                               ("4xH100-SXM", 4, "H100"), ("NVIDIA L40S", 1, "L40S")])  # fmt: skip
def test_a_gpu_is_named_as_people_do(text, count, name):
    found = gpus(text)
    assert (found[0], found[1].name) == (count, name)


@pytest.mark.parametrize("text", ["8xH99", "", "8"])
def test_an_unknown_gpu_gets_the_known_names(text):
    with pytest.raises(ConfigError, match="known: A100, .*H100.*MI300X"):
        gpus(text)


def test_beyond_a_node_the_network_is_the_slowest_link():
    assert H100.sends(8) == LINKS * 450e9
    assert H100.sends(16) == LINKS * NETWORK


def test_an_operation_takes_as_long_as_its_arithmetic_or_its_bytes():
    with TimedBytes(H100) as live:
        with live.fakes:
            x, w = (torch.empty(4096, 4096, dtype=torch.bfloat16) for _ in range(2))
            one = torch.empty(1, 4096, dtype=torch.bfloat16)
        live.seconds = 0.0
        x @ w
        assert live.seconds == pytest.approx(2 * 4096**3 / (PRODUCTS * 989e12))  # arithmetic
        live.seconds = 0.0
        one @ w
        assert live.seconds == pytest.approx(2 * (4096**2 + 2 * 4096) / (READS * 3350e9))  # bytes
        live.seconds = 0.0
        x.t()[:7].unsqueeze(0)
        assert live.seconds == 0.0  # views


def decoding(**more):
    given = {"gpu": H100, "gpus": 1, "weights": 16_000_000_000, "parameters": 8_000_000_000, "key_bytes": 131_072,
             "room": 10**12, "item_bytes": 2, "kernels": 0}  # fmt: skip
    return Decoding(**{**given, **more})


def test_a_completion_alone_reads_the_weights_once_a_token():
    seconds = decoding(key_bytes=0).seconds(1, 1, 0, 100, 100)
    assert seconds == pytest.approx(100 * 16e9 / (READS * 3350e9))


def test_a_step_of_a_small_model_is_launching():
    """Qwen2.5 0.5B alone: 0.99 GB are read in 0.33 ms. In a graph the kernels come on top; outside of one the host is the slower."""
    kernels = kernels_of("qwen2", 24, is_vllm=False)
    one = decoding(weights=988_000_000, parameters=494_000_000, key_bytes=0, kernels=kernels)
    reading = 988e6 / (READS * 3350e9)
    assert kernels == 24 * 9 + 7
    assert one.seconds(1, 1, 0, 100, 100) == pytest.approx(100 * (reading + kernels * A_KERNEL))
    assert replace(one, is_replayed=False).seconds(1, 1, 0, 100, 100) == pytest.approx(100 * kernels * LAUNCHED)
    large = replace(decoding(key_bytes=0, weights=160_000_000_000), kernels=kernels, is_replayed=False)
    device = 160e9 / (READS * 3350e9) + kernels * A_KERNEL  # the host is hidden behind it
    assert large.seconds(1, 1, 0, 100, 100) == pytest.approx(100 * device)


MEASURED = [(512, 512, 512, 3.40), (256, 256, 256, 1.12), (256, 256, 512, 2.2)]
"""Completions in groups of 8, tokens of a prompt and of a completion, seconds: rollouts of Qwen2.5 0.5B in bfloat16 on one H100 80GB
SXM, torch 2.11, 2026-11-26, at 46af3d2: 647 kernels a step, and passes over the logits that moved 57 bytes a logit (0.75 ms)."""


@pytest.mark.parametrize("completions, prompt, longest, seconds", MEASURED)
def test_a_measured_rollout_is_predicted_within_15_percent(completions, prompt, longest, seconds):
    size = 494_032_768
    one = decoding(weights=2 * size, parameters=size, key_bytes=12_288, kernels=647, logit_bytes=57 * 151_936)
    assert one.seconds(completions, 8, prompt, longest, longest) == pytest.approx(seconds, rel=0.15)


def test_the_keys_of_a_prompt_are_read_once_a_group_by_the_native_engine():
    once, each = (decoding(weights=0, parameters=1, shares_prompts=shares) for shares in (True, False))
    seconds = [one.seconds(8, 8, 1000, 1, 1) - one.seconds(8, 8, 0, 1, 1) for one in (once, each)]
    prefill = 2 * 1000 / H100.flops(2)
    reading = 1000 * 131_072 / (READS * 3350e9)
    assert seconds == pytest.approx([prefill + reading, prefill + 8 * reading])


def test_two_gpus_share_the_reading_and_a_small_cache_makes_waves():
    assert decoding(gpus=2).seconds(64, 8, 100, 500, 500) == pytest.approx(decoding().seconds(64, 8, 100, 500, 500) / 2)
    roomy, small = decoding(), decoding(room=8 * 131_072 * 512)
    assert small.seconds(64, 8, 100, 500, 500) > 5 * roomy.seconds(64, 8, 100, 500, 500)


def test_the_end_of_a_rollout_is_paid_for():
    """Completions of 500 tokens in the mean, at most 4,000: longer than 500 steps of all, shorter than 4,000."""
    one = decoding()
    assert (
        one.seconds(256, 8, 100, 500, 500) < one.seconds(256, 8, 100, 500, 4000) < one.seconds(256, 8, 100, 4000, 4000)
    )


@pytest.mark.parametrize("mean, longest", [(100, 4000), (795, 3946), (3000, 4000)])
def test_the_lengths_have_the_mean_that_was_asked_for(mean, longest):
    rate, steps = rate_of(mean, longest), 100_000
    width = longest / steps
    assert sum(math.exp(-rate * (i + 0.5) * width) * width for i in range(steps)) == pytest.approx(mean, rel=0.01)


PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768, "Qwen/Qwen2.5-7B": 7_615_616_512, "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360, "meta-llama/Llama-3.1-8B": 8_030_261_248, "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616, "mistralai/Mistral-7B-v0.3": 7_248_023_552,
}  # fmt: skip
"""Parameters by the hub's pages of the models."""


def parameters_of(name):
    from transformers import AutoModelForCausalLM

    config, counts = config_by_name(name), []
    for layers in (1, 2):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shortened(config, layers))
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
    return counts[0] + (config.num_hidden_layers - 1) * (counts[1] - counts[0])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_known_model_has_as_many_parameters_as_published(name):
    assert parameters_of(name) == PUBLISHED[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in PUBLISHED])
def test_the_size_in_a_models_name_is_its_own(name):
    size = float(name.rpartition("-")[2].removesuffix("B"))
    assert parameters_of(name) / 1e9 == pytest.approx(size, rel=0.11)


def test_a_model_is_known_without_its_owner_and_with_a_suffix():
    assert config_by_name("qwen2.5-7b-instruct").hidden_size == 3584
    assert config_by_name("Qwen/Qwen2.5-9B") is None


@pytest.mark.parametrize("given, said", [({"deepspeed": "x.json"}, "--deepspeed"), ({"use_cpu": True}, "doctor memory"),
                                         ({"fp16": True}, "bfloat16")])  # fmt: skip
def test_what_a_plan_cannot_look_at_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        planned({"output_dir": "unused", **given})


def test_a_split_model_may_be_sampled_by_vllm_and_lie_in_host_memory():
    options = {"output_dir": "unused", "use_vllm": True, "vllm_mode": "colocate", "fsdp": "full_shard offload"}
    config, is_split, offloads = planned(options)
    assert config.use_vllm
    assert is_split
    assert offloads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "sentence"), rest_nightly([("0.000001", "of 1.0 KiB: does not fit"), ("64", "of 64.0 GiB: fits")], 1)
)
def test_host_memory_is_judged_where_it_is_named(host, sentence, tmp_path, capsys):
    from covey.cli import main

    tiny_model().config.save_pretrained(tmp_path)
    words = ["--model", str(tmp_path / "config.json"), "--gpus", "2xH100", "--fsdp", "full_shard offload"]
    words += ["--max-completion-length", "16"]
    assert main(["doctor", "plan", *words, "--host-gib", host]) == (host != "64")
    out = capsys.readouterr().out
    assert sentence in out
    assert re.search(r"peak .* of .* GiB: fits", out)  # a GPU holds its part either way


def test_a_host_without_memory_is_refused(capsys):
    from covey.cli import main

    assert main(["doctor", "plan", "--model", "demo", "--gpus", "2xH100", "--host-gib", "0"]) != 0
    assert "--host-gib 0 is no memory of a node" in capsys.readouterr().err


@pytest.fixture(scope="module")
def setup():
    options = {"output_dir": "unused", "report_to": "none", "per_device_train_batch_size": 4, "num_generations": 4}
    config, is_split, offloads = planned({**options, "max_completion_length": 1024, "fsdp": "true"})
    assert is_split
    assert not offloads
    return Setup(
        args=config, model_config=config_by_name("meta-llama/Llama-3.1-8B"), gpu=H100, gpus=4, prompt_tokens=32
    )


@pytest.mark.nightly
def test_splitting_divides_what_a_learner_keeps_and_products_take_most_of_the_time(setup):
    split = estimate(replace(setup, is_split=True))
    whole = estimate(setup, split.measurement)
    size = whole.measurement.size
    assert size == PUBLISHED["meta-llama/Llama-3.1-8B"]
    assert (whole.held.weights, whole.held.gradients, whole.held.optimizer) == pytest.approx(
        (4 * size, 4 * size, 8 * size), rel=0.01
    )
    assert split.held.weights == -(-whole.held.weights // 4)
    assert split.held.optimizer == -(-whole.held.optimizer // 4)
    assert split.held.activations == whole.held.activations
    assert split.held.gathered > 0 == whole.held.gathered
    host = estimate(replace(setup, is_split=True, offloads=True), split.measurement)
    assert host.host == 4 * (split.held.weights + split.held.gradients + split.held.optimizer)
    assert host.held.stays == host.held.gradients == 0
    assert host.held.peak < split.held.peak
    assert host.seconds.update > split.seconds.update
    by_link = split.measurement.weights / 4 / HOST_LINK  # PCIe takes longer than NVLink
    assert host.seconds.sync == pytest.approx(by_link)
    # time of the products alone, without reading and writing what lies between them
    products = 8 * size * whole.measurement.tokens  # forward, again for the backward, and backward
    assert 0.95 < whole.measurement.learning / (products / H100.flops(2)) < 2


@pytest.mark.nightly
def test_frozen_weights_in_bfloat16_are_proposed_to_a_run_that_trains_adapters_beside_float32():
    peft = pytest.importorskip("peft")
    config, *_ = planned(
        {"output_dir": "unused", "report_to": "none", "num_generations": 4, "max_completion_length": 256}
    )
    model = AutoConfig.for_model("llama", hidden_size=256, num_hidden_layers=2, intermediate_size=512, vocab_size=4096)
    adapter = peft.LoraConfig(r=8, task_type="CAUSAL_LM")
    plan = estimate(Setup(args=config, model_config=model, gpu=H100, gpus=1, adapter=adapter, prompt_tokens=32))
    change = next(iter(answers(plan, None)))
    assert change.change == "frozen weights in bfloat16 (--dtype bfloat16)"
    assert change.peak == pytest.approx(plan.held.peak - plan.held.weights / 2 - plan.held.sampler, rel=0.1)
    config.bf16 = False
    assert not any("bfloat16" in one.change for one in answers(plan, None))
