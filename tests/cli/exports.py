"""Models saved and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from covey.cli import main
from kit import tiny_model, tiny_tokenizer


def saved(folder: Path, architecture: str) -> Any:
    """A tiny model of a family, whose vectors and biases are no ones and zeros, in a folder with its tokenizer."""
    model = tiny_model(architecture).eval()
    if architecture == "qwen3":  # transformers' reader of GGUF takes heads of 128, as every Qwen3 has, for granted
        model = type(model)(type(model.config)(**{**model.config.to_dict(), "head_dim": 128})).eval()
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.2)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def exported(capsys, *words: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["export", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)
