"""`covey merge`: a model of its own that answers as the adapter on its base did, or one sentence and nothing written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.cli import main
from kit import tiny_model, tiny_tokenizer

peft = pytest.importorskip("peft")
IDS = torch.arange(3, 15)[None]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A base model and an adapter on it that does something, as folders."""
    base = tiny_model("qwen2").eval()
    base.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    adapted = peft.get_peft_model(base, config)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    tiny_tokenizer().save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def test_the_merged_model_answers_as_the_adapter_did(adapter: Path, tmp_path: Path, capsys) -> None:
    assert main(["merge", str(adapter), "-o", str(tmp_path / "merged"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["logits_apart"] < 1e-5
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    untouched = logits(base)
    expected = logits(peft.PeftModel.from_pretrained(base, adapter))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.allclose(logits(merged), expected, atol=1e-5)
    assert not torch.allclose(expected, untouched, atol=1e-2), "the adapter does something"
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("2 + 2").input_ids


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")  # PEFT's, of the first two
@pytest.mark.parametrize(
    ("options", "is_tied"),
    [
        ({"modules_to_save": ["lm_head"]}, False),
        ({"modules_to_save": ["embed_tokens"]}, False),
        ({"trainable_token_indices": {"lm_head": [5]}}, False),
        ({"trainable_token_indices": [5]}, True),
        ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
    ],
)
def test_a_head_that_shares_the_embeddings_is_merged_with_what_was_trained_of_either(tmp_path, options, is_tied):
    base = tiny_model("qwen2", tie_word_embeddings=True)
    base.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], **options))
    torch.manual_seed(0)
    for weight in (weight for weight in adapted.parameters() if weight.requires_grad):
        weight.data.add_(0.3 * torch.randn_like(weight))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    tiny_tokenizer().save_pretrained(tmp_path / "adapter")
    assert main(["merge", str(tmp_path / "adapter"), "-o", str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-5, atol=1e-5)
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == is_tied


def test_weights_are_written_in_the_type_that_is_asked_for(adapter: Path, tmp_path: Path) -> None:
    assert main(["merge", str(adapter), "--output", str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.bfloat16


def test_the_error_that_is_told_is_that_of_the_weights_that_are_written(tmp_path: Path, capsys) -> None:
    torch.manual_seed(0)
    base = tiny_model("qwen2").bfloat16()
    base.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base.float(), peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=1e-3)  # near the rounding of bfloat16
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    tiny_tokenizer().save_pretrained(tmp_path / "adapter")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    expected = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter").eval()
    ids = torch.arange(1, 17)[None]
    for dtype, is_lossy in (("bfloat16", True), ("float32", False)):
        words = [] if is_lossy else ["--dtype", "float32"]  # bfloat16 is how the base is stored
        assert main(["merge", str(tmp_path / "adapter"), "-o", str(tmp_path / dtype), "--json", *words]) == 0
        facts = json.loads(capsys.readouterr().out)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / dtype, dtype=torch.float32).eval()
        with torch.no_grad():
            mine, theirs = merged(ids).logits, expected(ids).logits
        apart = ((mine - theirs).abs().max() / theirs.abs().max()).item()
        assert facts["dtype"] == dtype
        assert facts["logits_apart"] == pytest.approx(apart, rel=1e-3, abs=1e-7)
        assert (facts["logits_apart"] > 0.01 * facts["logits_moved"]) == is_lossy
    assert main(["merge", str(tmp_path / "adapter"), "-o", str(tmp_path / "told")]) == 0
    assert "of what the adapter changed; --dtype float32 keeps it" in capsys.readouterr().err


def test_what_cannot_be_merged_is_told_in_a_sentence(adapter: Path, tmp_path: Path, capsys) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "notes.txt").write_text("mine")
    for words, said in (
        ([str(adapter)], "needs what to merge and a folder to write to"),
        ([str(adapter), "-o", str(there)], "is there already"),
        ([str(tmp_path / "nowhere"), "-o", str(tmp_path / "x")], "nowhere' does not exist"),
        ([str(tmp_path / "base"), "-o", str(tmp_path / "x")], "holds whole weights and no adapter"),
        ([str(adapter), "-o", str(tmp_path / "x"), "--dtype", "int8"], "give float32, bfloat16 or float16"),
        ([str(adapter), "-o", str(tmp_path / "x"), "--base", str(tmp_path / "none")], "none"),
    ):
        assert main(["merge", *words]) != 0
        assert said in capsys.readouterr().err
    assert (there / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "x").exists()


def test_an_adapter_of_another_model_is_refused(adapter: Path, tmp_path: Path, capsys) -> None:
    tiny_model("qwen2", hidden=16).save_pretrained(tmp_path / "smaller")
    assert main(["merge", str(adapter), "-o", str(tmp_path / "x"), "--base", str(tmp_path / "smaller")]) != 0
    assert "cannot be added into" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
