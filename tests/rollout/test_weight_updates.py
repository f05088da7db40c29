"""Seconds and bytes of each update of a sampler's weights, by sampler."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch

from covey.rollout import NativeSampler, SamplingParams, sampler_metrics, worker_process
from covey.rollout.autocast import AutocastForward
from covey.rollout.environments import Environment
from covey.rollout.gathered import GatheredSampler
from covey.rollout.turns import TurnSampler
from forked import worker_of
from kit import tiny_model, tiny_tokenizer


def updates(sampler):
    """Number of updates, their mean megabytes; None if there was none."""
    seen = sampler_metrics(sampler)
    if not seen:
        return None
    assert seen["weights/seconds"].value > 0
    return seen["weights/mb"].count, seen["weights/mb"].value


def test_live_weights_are_read_and_a_copy_is_counted():
    model = tiny_model("qwen2")
    live = NativeSampler(model, tiny_tokenizer(), dtype="float32")
    live.load(model, 1)
    live.load(model, 2)
    assert updates(live) == (2, 0)
    assert updates(live) is None, "each update is counted once"
    copied = NativeSampler(model, tiny_tokenizer(), dtype="bfloat16")
    copied.load(model, 1)
    matrices = {id(p): p for p in model.parameters() if p.dim() == 2}.values()
    linear = [*(p for p in matrices if p is not model.model.embed_tokens.weight), model.lm_head.weight]
    count, megabytes = updates(copied)
    assert count == 1
    assert megabytes >= 2 * sum(p.numel() for p in linear) / 1e6
    assert megabytes < 2.1 * sum(p.numel() for p in model.parameters()) / 1e6


def test_the_copy_that_autocast_reads_is_counted():
    model = tiny_model("gpt2")
    forward = AutocastForward(model, torch.bfloat16)
    assert forward.copied_bytes == 2 * sum(mine.numel() for _, mine in forward._copies) > 0


def test_a_sampler_of_turns_hands_on_what_its_own_measures():
    model = tiny_model("qwen2")
    inner = NativeSampler(model, tiny_tokenizer(), dtype="float32")
    environment: Environment = lambda *parts: None
    turns = TurnSampler(inner, environment, tiny_tokenizer(), None)
    turns.load(model, 1)
    assert updates(turns) == (1, 0)


def test_a_gather_of_a_split_model_counts_its_bytes_once():
    model = tiny_model("qwen2")

    class Shards:
        whole = model
        free = staticmethod(lambda: None)
        gathered = staticmethod(lambda: contextlib.nullcontext(model))

    sampler = GatheredSampler(Shards(), lambda whole: NativeSampler(whole, tiny_tokenizer(), dtype="float32"))
    list(sampler.sample(["2 + 2 ="], 2, SamplingParams(max_tokens=2)))
    assert updates(sampler) == (1, pytest.approx(sum(p.nbytes for p in model.parameters()) / 1e6))
    assert updates(sampler) is None


@pytest.mark.slow
def test_rollouts_ahead_log_what_is_handed_to_each_worker(tmp_path: Path, monkeypatch):
    from faults.small_runs import trainer

    monkeypatch.setattr(worker_process, "_start", worker_of("covey.rollout.worker"))
    run = trainer(tmp_path, max_steps=4, async_rollouts=True, max_staleness=1, save_strategy="no")
    run.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    sent = [line["weights/mb"] for line in lines if "weights/mb" in line]
    assert sent
    trained = {id(p): p.nbytes for p in run.model.parameters() if p.requires_grad}
    assert sent == [pytest.approx(sum(trained.values()) / 1e6)] * len(sent)
