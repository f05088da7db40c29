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
