"""GGUF files of `covey export` opened by llama.cpp itself: the same tokens, log-probabilities and answers. `make test-llama-cpp`."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import exported, saved
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.demo import model_path, problems

llama_cpp = pytest.importorskip("xllamacpp", reason="a build of llama.cpp: make test-llama-cpp")
TEXTS = ("2 + 2 = 4", "Hello  world\n\n x", "12345 3.14", "grüße, 中文 и ещё", "it's I'LL <|im_end|> end")


def served(file: Path) -> Any:
    """llama.cpp's server of a file, in this process."""
    asked = llama_cpp.CommonParams()
    asked.model.path, asked.n_ctx, asked.n_parallel, asked.warmup, asked.cpuparams.n_threads = (
        str(file),
        256,
        1,
        False,
        1,
    )
    return llama_cpp.Server(asked)


def tokenized(server: Any, text: str) -> list[int]:
    body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
    request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return list(json.load(reply)["tokens"])


def greedy(model: Any, ids: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Tokens that the model likes most, one after the other, and their log-probabilities [count]."""
    found: list[int] = []
    logps = []
    for _ in range(count):
        with torch.no_grad():
            row = model(torch.tensor([[*ids, *found]])).logits[0, -1].float().log_softmax(0)
        found.append(int(row.argmax()))
        logps.append(row.max())
    return found, torch.stack(logps)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_llama_cpp_writes_the_tokens_that_the_model_writes(architecture: str, tmp_path: Path, capsys) -> None:
    model = saved(tmp_path / "m", architecture)
    exported(capsys, tmp_path / "m", "--format", "gguf", "--outtype", "f32", "-o", tmp_path / "m.gguf")
    tokens, logps = greedy(model, [*range(3, 15)], 8)
    asked = {"prompt": [*range(3, 15)], "n_predict": 8, "temperature": 0, "n_probs": 1, "ignore_eos": False}
    said = served(tmp_path / "m.gguf").handle_completions(asked)["choices"][0]["logprobs"]["content"]
    assert [one["id"] for one in said] == tokens[: len(said)]
    assert torch.allclose(torch.tensor([one["logprob"] for one in said]), logps[: len(said)], atol=1e-3)


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
def test_llama_cpp_answers_the_demo_as_transformers_does(outtype: str, tmp_path: Path, capsys) -> None:
    """Its own tokenizer, its own reading of the chat template."""
    exported(capsys, "demo", "--format", "gguf", "--outtype", outtype, "-o", tmp_path / "demo.gguf")
    tokenizer, model = (
        AutoTokenizer.from_pretrained(model_path()),
        AutoModelForCausalLM.from_pretrained(model_path()).float(),
    )
    server = served(tmp_path / "demo.gguf")
    assert [tokenized(server, text) for text in TEXTS] == [
        tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS
    ]
    same = 0
    for one in problems("test", 20):
        asked = [{"role": "user", "content": one.question}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        written = model.generate(**ids, do_sample=False, max_new_tokens=32)[0, ids["input_ids"].shape[1] :]
        answer = server.handle_chat_completions({"messages": asked, "temperature": 0, "max_tokens": 32})
        same += answer["choices"][0]["message"]["content"] == tokenizer.decode(written, skip_special_tokens=True)
    assert same == 20 if outtype == "f32" else same >= 18
