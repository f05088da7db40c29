"""`covey export`: what other programs open answers as the model does. GGUF files are opened by transformers' own reader of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exports import exported, saved
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.cli import main
from covey.demo import model_path
from kit import rest_nightly, tiny_tokenizer

gguf = pytest.importorskip("gguf")
IDS = torch.arange(3, 15)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits.float()


@pytest.mark.parametrize("architecture", rest_nightly(["llama", "qwen2", "qwen3"], ["qwen3"]))
def test_another_reader_of_gguf_gets_the_same_answers(architecture: str, tmp_path: Path, capsys) -> None:
    model = saved(tmp_path / "m", architecture)
    done = exported(capsys, tmp_path / "m", "--format", "gguf", "--outtype", "f32", "-o", tmp_path / "m.gguf")
    assert done["error"] == 0.0
    back = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    assert torch.allclose(logits(back), logits(model), atol=1e-5)


def test_heads_of_llama_are_in_the_order_that_llama_cpp_rotates(tmp_path: Path, capsys) -> None:
    model = saved(tmp_path / "m", "llama")
    exported(capsys, tmp_path / "m", "--format", "gguf", "--outtype", "f32", "-o", tmp_path / "m.gguf")
    tensors = {one.name: one.data for one in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    own = model.model.layers[0].self_attn.q_proj.weight.detach()
    theirs = torch.from_numpy(tensors["blk.0.attn_q.weight"].copy())
    half = own.shape[0] // model.config.num_attention_heads // 2
    assert torch.equal(theirs[0], own[0])
    assert torch.equal(theirs[1], own[half])
    assert torch.equal(theirs[2], own[1])


def test_the_tokenizer_and_the_template_are_in_the_file(tmp_path: Path, capsys) -> None:
    exported(capsys, "demo", "--format", "gguf", "-o", tmp_path / "demo.gguf")
    fields = gguf.GGUFReader(tmp_path / "demo.gguf").fields
    own = AutoTokenizer.from_pretrained(model_path())
    assert fields["tokenizer.ggml.tokens"].contents()[: len(own)] == own.convert_ids_to_tokens(range(len(own)))
    assert fields["tokenizer.ggml.eos_token_id"].contents() == own.eos_token_id
    assert fields["tokenizer.chat_template"].contents() == own.chat_template
    assert fields["tokenizer.ggml.pre"].contents() == "qwen2"


@pytest.mark.parametrize(("outtype", "most"), [("f16", 5e-4), ("bf16", 4e-3), ("q8_0", 5e-3)])
def test_smaller_types_round_as_far_as_they_say(outtype: str, most: float, tmp_path: Path, capsys) -> None:
    model = saved(tmp_path / "m", "qwen2")
    done = exported(capsys, tmp_path / "m", "--format", "gguf", "--outtype", outtype, "-o", tmp_path / "m.gguf")
    assert 0 < done["error"] < most
    assert done["bytes"] < 0.8 * sum(4 * weight.numel() for weight in model.parameters()) + 20_000
    back = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    assert torch.allclose(logits(back), logits(model), atol=0.05 * float(logits(model).abs().max()))


def test_an_adapter_is_added_or_taken_alone(tmp_path: Path, capsys) -> None:
    peft = pytest.importorskip("peft")
    base = saved(tmp_path / "base", "qwen2")
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "a")
    tiny_tokenizer().save_pretrained(tmp_path / "a")
    (tmp_path / "a" / "covey_state.json").write_text("{}")
    (tmp_path / "a" / "spiece.model").write_bytes(b"pieces")
    expected = logits(adapted)
    exported(capsys, tmp_path / "a", "--format", "gguf", "--outtype", "f32", "-o", tmp_path / "a.gguf")
    back = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float32)
    assert torch.allclose(logits(back), expected, atol=1e-5)
    exported(capsys, tmp_path / "a", "--format", "merged", "-o", tmp_path / "whole")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    assert torch.allclose(logits(whole), expected, atol=1e-5)
    done = exported(capsys, tmp_path / "a", "--format", "adapter", "-o", tmp_path / "alone")
    assert done["base"] == str(tmp_path / "base")
    assert "covey_state.json" not in done["files"], "an adapter is given away without its optimizer"
    assert "spiece.model" in done["files"]
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    assert torch.allclose(logits(peft.PeftModel.from_pretrained(fresh, tmp_path / "alone")), expected, atol=1e-5)


def test_a_damaged_file_is_not_kept(tmp_path: Path, monkeypatch, capsys) -> None:
    real = gguf.GGUFWriter.add_tensor

    def spoiled(self, name, tensor, *args, **kwargs):
        real(self, name, tensor * 1.01 if name == "blk.0.ffn_up.weight" else tensor, *args, **kwargs)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", spoiled)
    assert main(["export", "demo", "--format", "gguf", "--outtype", "f32", "-o", str(tmp_path / "x.gguf")]) == 2
    assert "mlp.up_proj.weight reads back unlike it was" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_exported_is_told_in_a_sentence(tmp_path: Path, capsys) -> None:
    saved(tmp_path / "g", "gpt2")
    saved(tmp_path / "relu", "qwen2")
    config = tmp_path / "relu" / "config.json"
    config.write_text(config.read_text().replace('"hidden_act": "silu"', '"hidden_act": "relu"'))
    for words, said in (
        (["demo", "-o", "x"], "a model needs --format merged, adapter or gguf"),
        (["demo", "--format", "gguf"], "needs a model and --output"),
        (["demo", "-o", "x", "--format", "ggu"], "Did you mean gguf?"),
        (["demo", "-o", str(tmp_path / "x"), "--format", "adapter"], "holds whole weights and no adapter"),
        (["demo", "-o", str(tmp_path / "x"), "--format", "merged", "--outtype", "f16"], "belongs to --format gguf"),
        (["demo", "-o", str(tmp_path / "x"), "--format", "gguf", "--outtype", "q4_k"], "is not one of f32, f16"),
        ([str(tmp_path / "g"), "-o", str(tmp_path / "x"), "--format", "gguf"], "not for 'gpt2'"),
        (
            [str(tmp_path / "relu"), "-o", str(tmp_path / "x"), "--format", "gguf"],
            "the activation 'relu'; llama.cpp computes silu",
        ),
        (["demo", "-o", str(tmp_path), "--format", "gguf"], "is there already"),
        (["demo", "-o", str(tmp_path / "x"), "--format", "merged", "--base", "b"], "nothing is added here"),
    ):
        assert main(["export", *words]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
