"""The reward by the values of a column: in a real run's metrics, the same after a resume, and within bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset

from covey.errors import ConfigError
from covey.monitor.slices import MAX_VALUES, Slices
from faults.small_runs import lines, trainer
from kit import group


def test_the_mean_reward_of_each_value_is_told():
    slices = Slices(["level"])
    groups = [
        group(["a", "b"], rewards=[[1.0], [0.0]], columns={"level": "easy"}),
        group(["a", "b"], rewards=[[1.0], [1.0]], columns={"level": "easy"}),
        group(["a", "b"], rewards=[[0.0], [float("nan")]], columns={"level": "hard"}),
    ]
    found = slices(groups, torch.tensor([2.0]))
    assert {name: metric.value for name, metric in found.items()} == {
        "reward/level=easy": 1.5,
        "reward/level=hard": 0.0,
    }


def test_many_values_share_the_rest_and_names_stay():
    slices = Slices(["row"])
    many = [group(["a", "b"], rewards=[[1.0], [0.0]], columns={"row": n}) for n in range(MAX_VALUES + 5)]
    assert len(slices(many, torch.tensor([1.0]))) == MAX_VALUES + 1
    again = Slices(["row"])
    again.load_state_dict(slices.state_dict())
    assert set(again(many[-2:], torch.tensor([1.0]))) == {"reward/row=other"}


def test_a_run_logs_them(tmp_path: Path):
    rows = [{"prompt": f"{i}", "level": "even" if i % 2 == 0 else "odd"} for i in range(8)]
    trainer(tmp_path / "run", train_dataset=Dataset.from_list(rows), max_steps=3, metrics_by=["level"]).train()
    assert {name for line in lines(tmp_path / "run") for name in line if name.startswith("reward/level")} == {
        "reward/level=even",
        "reward/level=odd",
    }


def test_a_column_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"metrics_by names the column 'levle', but the data set has prompt, level.*level"
    ):
        trainer(tmp_path / "run", train_dataset=Dataset.from_list([{"prompt": "a", "level": 1}]), metrics_by=["levle"])
