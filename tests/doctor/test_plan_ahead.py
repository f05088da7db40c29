"""A plan for GPUs that are not here: the roofline by hand, published models, and what splitting divides."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from covey.doctor.layers import shortened
from covey.doctor.roofline.answers import answers
from covey.doctor.roofline.estimate import Setup, estimate
from covey.doctor.roofline.gpus import GPUS, LINKS, NETWORK, PRODUCTS, READS, gpus
from covey.doctor.roofline.known_models import KNOWN, known_config
from covey.doctor.roofline.operations import TimedBytes
from covey.doctor.roofline.options import planned
from covey.doctor.roofline.rollout import LAUNCHED, REPLAYED, Decoding, kernels_of, rate_of
from covey.errors import ConfigError
from covey.rollout import NativeSampler, SamplingParams
from covey.rollout.graph_scheduler import GraphScheduler
from covey.rollout.static_kv_cache import StaticKVCache
from kit import tiny_model, tiny_tokenizer

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
    """Qwen2.5 0.5B alone: 0.99 GB are read in 0.43 ms. In a graph the kernels' gaps come on top; outside of one the host is the slower."""
    kernels = kernels_of("qwen2", 24, is_vllm=False)
    one = decoding(weights=988_000_000, parameters=494_000_000, key_bytes=0, kernels=kernels)
    reading = 988e6 / (READS * 3350e9)
    assert kernels == 24 * 32 + 65
    assert one.seconds(1, 1, 0, 100, 100) == pytest.approx(100 * (reading + kernels * REPLAYED))
    assert replace(one, is_replayed=False).seconds(1, 1, 0, 100, 100) == pytest.approx(100 * kernels * LAUNCHED)
    large = replace(decoding(key_bytes=0, weights=160_000_000_000), kernels=kernels, is_replayed=False)
    assert large.seconds(1, 1, 0, 100, 100) == pytest.approx(
        100 * 160e9 / (READS * 3350e9)
    )  # hidden behind the reading


class Kernels(TorchDispatchMode):
    """Number of operations that compute, without those of decode attention, which Triton does on a GPU."""

    def __init__(self):
        super().__init__()
        self.count, self.is_attention = 0, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_free = function.is_view or "empty" in str(function) or function is torch.ops.aten._unsafe_view.default
        self.count += not (is_free or self.is_attention)
        return function(*args, **(kwargs or {}))


def kernels_of_a_step(arch, layers, monkeypatch):
    """Counted in the scheduler of a GPU, whose steps run here without a graph."""
    sampler, counts, mode = NativeSampler(tiny_model(arch, layers=layers), tiny_tokenizer(), dtype="bfloat16"), [], None
    sampler.is_static = True
    step, attend = GraphScheduler._one, StaticKVCache.attend_decode

    def counted(self, rows):
        nonlocal mode
        with Kernels() as mode:
            step(self, rows)
        counts.append(mode.count)

    def attended(self, *args):
        mode.is_attention = True
        result = attend(self, *args)
        mode.is_attention = False
        return result

    monkeypatch.setattr(GraphScheduler, "_one", counted)
    monkeypatch.setattr(StaticKVCache, "attend_decode", attended)
    list(sampler.sample([[5, 6, 7], [8, 9]], 4, SamplingParams(max_tokens=8)))
    monkeypatch.undo()
    return counts[2]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_planned_step_has_as_many_kernels_as_a_step(arch, monkeypatch):
    attention = 4  # keys and values stored, the prompts' part, the rows' own part, both merged (triton_attention.py)
    counted = {layers: kernels_of_a_step(arch, layers, monkeypatch) + layers * attention for layers in (1, 3)}
    assert counted == {layers: kernels_of(arch, layers, is_vllm=False) for layers in (1, 3)}


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

    config, counts = known_config(name), []
    for layers in (1, 2):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shortened(config, layers))
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
    return counts[0] + (config.num_hidden_layers - 1) * (counts[1] - counts[0])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_known_model_has_as_many_parameters_as_published(name):
    assert parameters_of(name) == PUBLISHED[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KNOWN if name not in PUBLISHED])
def test_the_size_in_a_models_name_is_its_own(name):
    size = float(name.rpartition("-")[2].removesuffix("B"))
    assert parameters_of(name) / 1e9 == pytest.approx(size, rel=0.11)


def test_a_model_is_known_without_its_owner_and_with_a_suffix():
    assert known_config("qwen2.5-7b-instruct").hidden_size == 3584
    assert known_config("Qwen/Qwen2.5-9B") is None


@pytest.mark.parametrize("given, said", [({"deepspeed": "x.json"}, "--deepspeed"), ({"use_cpu": True}, "doctor memory"),
                                         ({"use_vllm": True}, "colocate"), ({"fp16": True}, "bfloat16")])  # fmt: skip
def test_what_a_plan_cannot_look_at_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        planned({"output_dir": "unused", **given})


@pytest.fixture(scope="module")
def setup():
    options = {"output_dir": "unused", "report_to": "none", "per_device_train_batch_size": 4, "num_generations": 4}
    config, is_split = planned({**options, "max_completion_length": 1024, "fsdp": "true"})
    assert is_split
    return Setup(args=config, model_config=known_config("meta-llama/Llama-3.1-8B"), gpu=H100, gpus=4, prompt_tokens=32)


@pytest.mark.slow
def test_splitting_divides_what_a_learner_keeps_and_products_take_most_of_the_time(setup):
    split = estimate(replace(setup, is_split=True))
    whole = estimate(setup, split.found)
    size = whole.found.size
    assert size == PUBLISHED["meta-llama/Llama-3.1-8B"]
    assert (whole.held.weights, whole.held.gradients, whole.held.optimizer) == pytest.approx(
        (4 * size, 4 * size, 8 * size), rel=0.01
    )
    assert split.held.weights == -(-whole.held.weights // 4)
    assert split.held.optimizer == -(-whole.held.optimizer // 4)
    assert split.held.activations == whole.held.activations
    assert split.held.gathered > 0 == whole.held.gathered
    # time of the products alone, without reading and writing what lies between them
    products = 8 * size * whole.found.tokens  # forward, again for the backward, and backward
    assert 0.95 < whole.found.learning / (products / H100.flops(2)) < 2


@pytest.mark.nightly
def test_frozen_weights_in_bfloat16_are_proposed_to_a_run_that_trains_adapters_beside_float32():
    peft = pytest.importorskip("peft")
    config, _ = planned(
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
