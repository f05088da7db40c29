"""The reward by the values of a column: in a real run's metrics, the same after a resume, and within bounds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from covey.errors import ConfigError
from covey.monitor.slices import MAX_VALUES, Slices
from covey.types import Bound
from faults.small_runs import lines, trainer
from kit import group


def test_the_mean_reward_of_each_value_is_told():
    slices = Slices(["level"])
    groups = [
        group(["a", "b"], rewards=[[1.0], [0.0]], columns={"level": "easy"}),
        group(["a", "b"], rewards=[[1.0], [1.0]], columns={"level": "easy"}),
        group(["a", "b"], rewards=[[0.0], [float("nan")]], columns={"level": "hard"}),
    ]
    found = {name: metric.value for name, metric in slices(groups, torch.tensor([2.0])).items()}
    assert (found["reward/level=easy"], found["reward/level=hard"]) == (1.5, 0.0)
    assert (found["accuracy/level=easy"], found["accuracy/level=hard"]) == (0.75, 0.0)
    assert (found["length/level=easy"], found["truncated/level=easy"]) == (1.0, 0.0)
    assert found["reward/level=easy/low"] < 1.5 < found["reward/level=easy/high"]
    assert 0.0 == found["truncated/level=easy/low"] < found["truncated/level=easy/high"] < 1.0
    assert math.isnan(found["reward/level=hard/low"])  # one prompt tells nothing of prompts


def test_many_values_share_the_rest_and_names_stay():
    slices = Slices(["row"])
    many = [group(["a", "b"], rewards=[[1.0], [0.0]], columns={"row": n}) for n in range(MAX_VALUES + 5)]
    rewards = [
        name for name in slices(many, torch.tensor([1.0])) if name.startswith("reward/") and name.count("/") == 1
    ]
    assert len(rewards) == MAX_VALUES + 1
    again = Slices(["row"])
    again.load_state_dict(slices.state_dict())
    assert "reward/row=other" in again(many[-2:], torch.tensor([1.0]))


def test_a_run_logs_them(tmp_path: Path):
    rows = [{"prompt": f"{i}", "level": "even" if i % 2 == 0 else "odd"} for i in range(8)]
    trainer(
        tmp_path / "run",
        train_dataset=Dataset.from_list(rows),
        max_steps=2,
        per_device_train_batch_size=32,
        metrics_by=["level"],
    ).train()
    assert {name for line in lines(tmp_path / "run") for name in line if name.startswith("reward/level")} >= {
        "reward/level=even",
        "reward/level=odd",
        "reward/level=odd/low",
        "reward/level=odd/high",
    }


def test_the_interval_covers_the_mean_of_grouped_samples_as_often_as_it_says():
    """Completions of one prompt are alike: of 400 draws of 30 prompts about 95% cover the truth, where a naive one covers far fewer."""
    draw = torch.Generator().manual_seed(0)
    covered, naive = 0, 0
    for _ in range(400):
        chance = torch.rand(30, generator=draw)  # each prompt's own; their mean is 0.5
        hits = (torch.rand(30, 8, generator=draw) < chance[:, None]).double()
        low, high = Bound.both([(float(row.sum()), 8.0) for row in hits], is_share=True)
        covered += low.value <= 0.5 <= high.value
        share = float(hits.mean())
        naive += abs(share - 0.5) <= 1.96 * (share * (1 - share) / 240) ** 0.5
    assert 0.92 <= covered / 400 <= 0.98
    assert naive / 400 < 0.80


def test_parts_of_an_interval_merge_exactly():
    parts = [(1.0, 4.0), (3.0, 4.0), (0.0, 2.0), (4.0, 4.0)]
    whole, some, rest = (Bound.both(p, is_share=False)[1] for p in (parts, parts[:1], parts[1:]))
    assert (some + rest).value == whole.value


def test_a_column_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"metrics_by names the column 'levle', but the data set has prompt, level.*level"
    ):
        trainer(tmp_path / "run", train_dataset=Dataset.from_list([{"prompt": "a", "level": 1}]), metrics_by=["levle"])


def test_an_evaluation_is_told_by_slice_too(tmp_path: Path):
    """Also of a value that training has no reward for, which is how transfer is measured."""
    held_out = Dataset.from_list([{"prompt": f"{i}", "level": ("even", "odd", "new")[i % 3]} for i in range(6)])
    rows = Dataset.from_list([{"prompt": f"{i}", "level": "even"} for i in range(4)])
    one = trainer(tmp_path / "run", train_dataset=rows, eval_dataset=held_out, max_steps=1, metrics_by=["level"])
    found = one.evaluate()
    assert found["eval_reward/level=new/low"] < found["eval_reward/level=new"] < found["eval_reward/level=new/high"]
    assert {"eval_length/level=odd", "eval_truncated/level=even"} <= set(found)
