"""Exports and merges of models that read media hold their processor."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForMultimodalLM, AutoProcessor

from covey.cli import main
from modalities.models import tiny_vlm


def test_a_merged_model_has_the_processor_of_its_base(tmp_path):
    peft = pytest.importorskip("peft")
    model, processor = tiny_vlm("llava")
    model.save_pretrained(tmp_path / "base")
    processor.save_pretrained(tmp_path / "base")
    base = AutoModelForMultimodalLM.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    processor.tokenizer.save_pretrained(tmp_path / "adapter")
    assert main(["merge", str(tmp_path / "adapter"), "-o", str(tmp_path / "merged")]) == 0
    assert main(["export", str(tmp_path / "base"), "--format", "merged", "-o", str(tmp_path / "whole")]) == 0
    for name in ("merged", "whole"):
        back = AutoProcessor.from_pretrained(tmp_path / name)
        assert back.image_processor.to_dict() == processor.image_processor.to_dict()


def test_every_part_of_the_config_names_the_type_in_which_a_merge_was_written(tmp_path):
    """Servers read the type of the part for text, and so does a further merge without --dtype."""
    peft = pytest.importorskip("peft")
    model, processor = tiny_vlm("llava")
    for name in ("base", "other"):
        model.to(torch.bfloat16).save_pretrained(tmp_path / name)
        processor.save_pretrained(tmp_path / name)
        AutoModelForMultimodalLM.from_pretrained(tmp_path / name, dtype="auto").save_pretrained(tmp_path / name)
    base = AutoModelForMultimodalLM.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    processor.tokenizer.save_pretrained(tmp_path / "adapter")
    sources = {"added": ["adapter"], "merged": ["base", "other"]}
    for out, names in sources.items():
        words = [str(tmp_path / name) for name in names]
        assert main(["merge", *words, "-o", str(tmp_path / out), "--dtype", "float32"]) == 0
        config = json.loads((tmp_path / out / "config.json").read_text())
        parts = [config, config["text_config"], config["vision_config"]]
        assert [part["dtype"] for part in parts] == ["float32"] * 3
