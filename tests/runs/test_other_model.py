"""A checkpoint copied without its `run.json` is resumed by a model of its kind alone, and another dtype is named."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from peft import LoraConfig

from covey.errors import ConfigError
from faults.small_runs import trainer
from kit import tiny_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Of a full model, away from its run."""
    folder = tmp_path_factory.mktemp("full")
    trainer(folder / "run", max_steps=1, save_steps=1).train()
    return shutil.copytree(folder / "run" / "checkpoint-1", folder / "copy" / "checkpoint-1")


OTHERS = {
    "an adapter": ({"peft_config": LoraConfig(target_modules=["q_proj"])}, "the model's class=Qwen2.* has PeftModel"),
    "another architecture": (
        {"model": "llama"},
        "the model's class=Qwen2ForCausalLM and this one has LlamaForCausalLM",
    ),
    "another size": ({"model": "larger"}, "the number of the model's parameters="),
}
MODELS = {"llama": lambda: tiny_model("llama"), "larger": lambda: tiny_model("qwen2", hidden=64), None: lambda: None}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_another_kind_is_refused_in_one_sentence(name, checkpoint, tmp_path):
    changed, sentence = OTHERS[name]
    model = MODELS[changed.get("model")]()
    with pytest.raises(ConfigError, match=sentence) as caught:
        trainer(tmp_path, max_steps=2, **{**changed, "model": model}).train(str(checkpoint))
    assert "start a new run from the checkpoint as its model" in str(caught.value)


def test_a_resume_in_another_dtype_is_named(checkpoint, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer(tmp_path, max_steps=2, model=tiny_model("qwen2").to(torch.bfloat16)).train(str(checkpoint))
    assert "is of weights in float32 and goes on in bfloat16" in caplog.text


FACTORS = {"lora_alpha": 99, "use_rslora": True, "alpha_pattern": {"q_proj": 2}}


@pytest.mark.parametrize("option", FACTORS)
def test_an_adapter_of_another_factor_is_refused(option, tmp_path):
    """Its factors fit, and their product would be of another size."""
    adapter = lambda **options: LoraConfig(r=4, target_modules=["q_proj"], **options)
    trainer(tmp_path / "run", max_steps=1, save_steps=1, peft_config=adapter()).train()
    copy = shutil.copytree(tmp_path / "run" / "checkpoint-1", tmp_path / "copy" / "checkpoint-1")
    for run, start in (("run", True), ("other", str(copy))):
        other = trainer(tmp_path / run, max_steps=2, save_steps=1, peft_config=adapter(**{option: FACTORS[option]}))
        with pytest.raises(ConfigError, match=r"the factors of the adapter \(by lora_alpha\)=2 for 1 q_proj and"):
            other.train(resume_from_checkpoint=start)
