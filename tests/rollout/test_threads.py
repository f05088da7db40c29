"""Threads of decoding: a model too small to gain by several takes one, and torch's number is as before after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from covey.rollout import NativeSampler, SamplingParams
from covey.rollout.hf import TransformersSampler
from covey.types import Prompt
from kit import tiny_model, tiny_tokenizer

PROMPTS = [Prompt(uid="0:0", token_ids=(5, 6, 7)), Prompt(uid="0:1", token_ids=(8, 9))]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", [NativeSampler, TransformersSampler])
@pytest.mark.parametrize(("hidden", "threads"), [(16, 1), (512, 2)])
def test_a_tiny_model_decodes_on_one_thread_and_a_larger_one_on_all(kind: Any, hidden: int, threads: int) -> None:
    counts: list[int] = []
    model = tiny_model("qwen2", hidden=hidden, head_dim=16)
    sampler = kind(model, tiny_tokenizer(), check_stop=lambda: counts.append(torch.get_num_threads()))
    sampler.load(model, version=0)
    list(sampler.sample(PROMPTS, 2, SamplingParams(max_tokens=4, seed=1)))  # compares it with a plain forward
    counts.clear()
    for _ in sampler.sample(PROMPTS, 2, SamplingParams(max_tokens=4, seed=1)):
        assert torch.get_num_threads() == 2  # rewards are called here
    assert set(counts) == {threads}
