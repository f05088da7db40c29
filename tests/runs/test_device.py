"""Where work runs: the accelerator by default, what was asked for otherwise, and one sentence for what cannot be."""

import sys

import pytest
import torch

from covey.cli import main
from covey.doctor import plan
from covey.errors import ConfigError
from covey.process import device as devices
from covey.process.device import choose_device, expect_supported, in_words
from covey.rollout.sampler import SamplingParams
from covey.rollout.sampling import draw
from covey.types import precise, widest_float
from kit import tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch):
    """A machine that says it has two CUDA devices."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


def test_the_accelerator_is_taken_where_there_is_one(gpu):
    assert choose_device() == torch.device("cuda", 0)
    assert choose_device("cpu") == CPU
    assert choose_device("cuda:1") == torch.device("cuda", 1)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_the_processor_is_taken_where_there_is_none():
    assert choose_device() == CPU
    assert in_words(CPU) == "the processor"


@pytest.mark.parametrize(
    "asked, said", [("gpu", "device 'gpu' is not known"), ("cuda:2", "is not there"), ("xpu", "is not there")]
)
def test_a_device_that_cannot_be_is_refused_in_one_sentence(asked, said, gpu):
    with pytest.raises(ConfigError, match=said):
        choose_device(asked)


def test_platforms_and_accelerators_that_are_not_supported_are_named_with_what_to_do(monkeypatch):
    with pytest.raises(ConfigError, match="accelerator is hpu: compute on the processor"):
        expect_supported(torch.device("hpu"))
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConfigError, match="this is win32; on Windows use WSL 2"):
        expect_supported(CPU)


@pytest.mark.parametrize("verb", ["eval", "features"])
def test_a_verb_that_asks_a_model_says_where_and_takes_a_device(verb, tmp_path, capsys):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "2 + 2 =", "answer": "4"}\n')
    more = {
        "eval": ["eval", "demo", "--dataset", str(data)],
        "features": ["features", str(data), "--features", "pass_rate", "--model", "demo", "--output", str(tmp_path / "out.jsonl")],
    }[verb]  # fmt: skip
    given = [*more, "--reward", "length(target=4)", "--max-tokens", "4"]
    assert main([*given, "--device", "cpu"]) == 0
    assert "on the processor" in capsys.readouterr().err
    assert main([*given, "--device", "tpu9", *(["--overwrite"] if verb == "features" else [])]) == 2
    assert "device 'tpu9' is not known" in capsys.readouterr().err


def test_what_a_doctor_has_loaded_counts_as_free_for_the_run(monkeypatch):
    monkeypatch.setattr(plan, "free_on", lambda device: 1000)
    model = tiny_model()
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    assert plan.available_memory(CPU)[0] == 1000
    assert plan.available_memory(CPU, model)[0] == 1000 + size
    monkeypatch.setattr(plan, "held_by_this_process", lambda device: 70)
    assert plan.available_memory(torch.device("cuda"), model) == (1070, "free on the accelerator")


def test_what_the_allocator_keeps_unused_is_free(monkeypatch):
    for name, value in {"memory_reserved": 50, "memory_allocated": 20}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    assert devices.free_on(torch.device("cuda", 0)) == 130
    assert devices.held_by_this_process(torch.device("cuda", 0)) == 20


def test_float64_is_taken_where_it_is():
    assert widest_float(torch.device("mps")) == torch.float32
    assert widest_float(CPU) == torch.float64
    assert precise(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float64


def test_tokens_drawn_without_float64_are_the_same_but_for_ties_and_never_impossible(monkeypatch):
    logits = torch.randn(2000, 700, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, ::3] = -torch.inf
    uniforms = torch.rand(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    uniforms[:4] = 1 - 1e-16
    uniforms[4:8] = 0
    wide = draw(logits.clone(), uniforms, SamplingParams()).tokens
    monkeypatch.setattr("covey.types.metrics.WITHOUT_FLOAT64", {"cpu"})
    narrow = draw(logits.clone(), uniforms.float(), SamplingParams()).tokens
    assert (wide == narrow).float().mean() > 0.998
    assert logits.gather(1, narrow[:, None]).isfinite().all()
