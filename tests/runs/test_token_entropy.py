"""A step's rollouts hold the entropy of every token that the policy learned from, as the policy before the update had it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from covey.runs import rollouts
from faults.small_runs import trainer


def parity(completion_ids: list[list[int]], **columns: object) -> list[float]:
    return [float(sum(ids) % 2) for ids in completion_ids]


def test_the_entropy_of_a_token_is_that_of_a_plain_forward_before_the_update(tmp_path: Path) -> None:
    one = trainer(tmp_path / "run", reward_funcs=parity, max_steps=1, save_strategy="no", rollout_log_steps=1)
    model, prompts = one.model, one.processing_class
    start = {name: value.clone() for name, value in model.state_dict().items()}
    one.train()
    model.load_state_dict(start)
    rows = rollouts.read(tmp_path / "run" / "rollouts" / "step-000001.parquet")
    learned = [row for row in rows if row["advantage"] != 0]
    assert learned
    for row in learned:
        prompt = prompts(row["prompt"])["input_ids"]
        with torch.no_grad():
            logits = model.eval()(torch.tensor([prompt + row["token_ids"]])).logits[0, len(prompt) - 1 : -1]
        expected = torch.distributions.Categorical(logits=logits).entropy()
        assert row["token/entropy"] == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_completion_that_taught_nothing_has_none(tmp_path: Path) -> None:
    same = lambda completions, **columns: [1.0] * len(completions)
    trainer(tmp_path / "run", reward_funcs=same, max_steps=1, save_strategy="no", rollout_log_steps=1).train()
    rows = rollouts.read(tmp_path / "run" / "rollouts" / "step-000001.parquet")
    assert [row["token/entropy"] for row in rows] == [None] * len(rows)
