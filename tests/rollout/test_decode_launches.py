"""Launches of a decode step on a GPU, counted on a CPU: each kernel of Triton as its PyTorch twin."""

import importlib.util
import subprocess
import sys

import pytest
import torch
from kernel_twins import Launches, with_twins
from plain_sampling import collect, ids_of
from static_runs import PROMPTS, WAYS, finishes_of, logprobs_of, writer

from covey.doctor.roofline.rollout import KERNELS_OF_A_LAYER, KERNELS_OF_A_STEP
from covey.kernels import TritonDecode
from covey.rollout import NativeSampler, SamplingParams
from covey.rollout.kernel_choice import verified_attention
from expert_models import expert_model, with_adapted_experts
from kit import rest_nightly, tiny_model, tiny_tokenizer

NO_TRITON = (subprocess.SubprocessError,)
A_LAYER = 10
"""Most launches of a layer, with keys that are split over programs."""
A_LAYER_OF_EXPERTS = 36
"""Launches of a Mixtral layer on its 16-bit copy by transformers' own modules."""


def launches_of_a_step(monkeypatch, layers, attention, way="plain", arch="qwen2", model=None, dtype=None):
    """Launches of one decode step of a float32 model on its 16-bit copy, or of `model` in `dtype`, as it is by default."""
    launches = Launches()
    with_twins(monkeypatch, launches, attention)
    dtype = dtype or ("float16" if model is None else "auto")
    model = model or tiny_model(arch, layers=layers, seed=3)
    sampler = NativeSampler(model, tiny_tokenizer(), dtype=dtype, attention="triton")
    assert sampler.attention == "triton"
    scheduler = sampler.begin(PROMPTS[:2], 4, SamplingParams(max_tokens=9, seed=1, **WAYS[way]))
    with sampler.forward.evaluating():
        scheduler._admit()
        scheduler.cache.reserve(1)
        launches.total = 0
        with launches:
            scheduler._one(scheduler.cache.num_computed)
    return launches.total


@pytest.mark.parametrize("arch", rest_nightly(["qwen2", "qwen3", "llama"], ["qwen3"]))
def test_a_layer_of_a_decode_step_takes_at_most_ten_launches(monkeypatch, arch):
    two, three = (launches_of_a_step(monkeypatch, layers, attention=3, arch=arch) for layers in (2, 3))
    assert three - two <= A_LAYER
    assert two - 2 * (three - two) <= KERNELS_OF_A_STEP


def test_a_layer_takes_one_launch_less_where_rows_fill_the_device(monkeypatch):
    two, three = (launches_of_a_step(monkeypatch, layers, attention=2) for layers in (2, 3))
    assert three - two == KERNELS_OF_A_LAYER
    assert two - 2 * (three - two) == KERNELS_OF_A_STEP


@pytest.mark.nightly
def test_adapters_on_a_16_bit_model_add_two_launches_each_to_their_layer(monkeypatch):
    """Two products, of which the second adds to the layer's output; query, key and value share the first."""
    peft = pytest.importorskip("peft")

    def model_of(layers):
        config = peft.LoraConfig(
            r=4, target_modules="all-linear"
        )  # PEFT writes the names of one model's layers into it
        return peft.get_peft_model(tiny_model("qwen2", layers=layers, seed=3).to(torch.bfloat16), config)

    two, three = (launches_of_a_step(monkeypatch, 0, attention=2, model=model_of(layers)) for layers in (2, 3))
    in_one_product = 2 + 1  # query, key and value, and gate and up, lie apart in live weights
    assert three - two == KERNELS_OF_A_LAYER + in_one_product + 7 + 5


@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_layer_of_experts_takes_the_same_launches_with_an_adapter_as_without(monkeypatch, is_adapted):
    """The copy has the adapter in it; PEFT would merge two weights of all experts in each step."""

    def model_of(layers):
        model = expert_model("Mixtral", num_hidden_layers=layers, vocab_size=len(tiny_tokenizer()))
        return with_adapted_experts(model) if is_adapted else model

    counts = [launches_of_a_step(monkeypatch, 0, 2, model=model_of(n), dtype="bfloat16") for n in (2, 3)]
    assert counts[1] - counts[0] == A_LAYER_OF_EXPERTS


def test_a_truncated_distribution_is_drawn_inside_the_step(monkeypatch):
    """Top-p included: nothing of it asks the host, and no operation is added but the search for a threshold."""
    plain, truncated = (launches_of_a_step(monkeypatch, 2, 2, way) for way in ("plain", "top_p"))
    assert truncated == plain  # the twin counts two launches; the kernel takes three


@pytest.mark.parametrize("way", rest_nightly(WAYS, ("rich",)))
def test_the_steps_write_the_completions_of_steps_as_written(monkeypatch, way):
    model, params = writer(), SamplingParams(max_tokens=40, seed=7, **WAYS[way])
    expected = collect(NativeSampler(model, tiny_tokenizer(), dtype="float32", max_rows=9), PROMPTS[:6], 4, params)
    with_twins(monkeypatch)
    sampler = NativeSampler(model, tiny_tokenizer(), dtype="float32", max_rows=9, attention="triton")
    groups = collect(sampler, PROMPTS[:6], 4, params)
    assert ids_of(groups) == ids_of(expected)
    assert finishes_of(groups) == finishes_of(expected)
    torch.testing.assert_close(logprobs_of(groups), logprobs_of(expected), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "error",
    [
        subprocess.CalledProcessError(1, ["gcc", "main.c"]),  # no Python.h
        OSError("libcuda.so.1 cannot be opened"),
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
    ],
)
def test_kernels_that_cannot_be_compiled_leave_the_work_to_pytorch_in_one_sentence(monkeypatch, caplog, error):
    def broken(*args, **options):
        raise error

    errors = TritonDecode.errors if importlib.util.find_spec("triton") else lambda: (*NO_TRITON, RuntimeError, OSError)
    with_twins(monkeypatch)
    monkeypatch.setattr(TritonDecode, "errors", staticmethod(errors))
    monkeypatch.setattr(TritonDecode, "add_norm", staticmethod(broken))
    model = tiny_model(layers=2)
    sampler = NativeSampler(model, tiny_tokenizer(), dtype="float32")
    assert verified_attention(sampler.forward, model, "auto") == "torch"
    (record,) = [record for record in caplog.records if "Triton" in record.message]
    assert record.message.startswith("Decoding with PyTorch's attention kernels: Triton's do not run here (")


def test_a_package_that_cannot_be_imported_is_a_reason(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "triton", None)
    reason = TritonDecode.unavailable_reason(torch.device("cuda"))
    assert reason is not None
    assert reason.startswith("the package triton is installed but cannot be imported (")
