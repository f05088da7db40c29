"""Columns of the table of runs: computed from what a run folder says, None where it does not."""

import json
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest

from covey.monitor.view.about_run import FIELDS, about, changed_options, elapsed
from covey.monitor.view.curves import curve_of
from covey.monitor.view.reading import RunView
from covey.runs import RunFolder


def columns(**values):
    def column(name):
        found = np.array(values.get(name.replace("/", "__"), []), float)
        return np.arange(1, len(found) + 1), found

    return column, [name.replace("__", "/") for name in values]


def about_of(tmp_path, found=None, **values):
    column, names = columns(**values)
    return about(found or {}, tmp_path, names, column)


def test_an_empty_run_says_nothing(tmp_path):
    assert about_of(tmp_path) == {**dict.fromkeys(FIELDS), "doubles": []}


def test_a_run_says_its_model_data_steps_duration_and_best_evaluation(tmp_path):
    (tmp_path / "train.yaml").write_text("model: x\ndataset: 'org/sums:train'\n")
    found = {"model": {"name": "/home/me/models/tiny", "adapter": {"r": 8}}, "config": {"max_steps": 50}}
    told = about_of(
        tmp_path, found, time=[10.0, 12.0, 19.5], eval_reward=[0.2, float("nan"), 0.7, 0.5], reward=[0.0, 0.5, 1.0]
    )
    assert told["model"] == "models/tiny + adapter"
    assert told["data"] == "org/sums:train"
    assert (told["steps"], told["seconds"]) == (50, 9.5)
    assert told["best"] == {"value": 0.7, "step": 3}
    assert told["reward_from"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("dataset", "shown"),
    [
        ({"rows": 4096, "columns": ["prompt", "answer"]}, "4096 rows: prompt, answer"),
        ({"rows": 5, "columns": []}, "5 rows"),
        ({"rows": None, "columns": ["prompt"]}, None),
        ({"rows": "many"}, None),
        ({"rows": 5, "columns": "prompt"}, "5 rows"),
        (["prompt"], None),
    ],
)
def test_data_without_a_name_is_shown_by_its_rows_and_columns(dataset, shown, tmp_path):
    assert about_of(tmp_path, {"dataset": dataset})["data"] == shown


def test_the_only_reward_that_repeats_the_total_is_a_double(tmp_path):
    same = about_of(tmp_path, reward=[0.0, 1.0], rewards__math__mean=[0.0, 1.0])
    assert same["doubles"] == ["rewards/math/mean"]
    weighted = about_of(tmp_path, reward=[0.0, 2.0], rewards__math__mean=[0.0, 1.0])
    assert weighted["doubles"] == []
    two = about_of(tmp_path, reward=[0.0, 1.0], rewards__math__mean=[0.0, 1.0], rewards__length__mean=[0.0, 0.0])
    assert two["doubles"] == []


def test_changed_options_leave_out_defaults_and_unknown_ones():
    assert changed_options({"config": {"beta": 0.04, "temperature": 1.0, "of_a_later_version": 3}}) == {"beta": 0.04}
    assert changed_options({"config": "none"}) == {}


@pytest.mark.parametrize(
    "found", [{"model": 3, "config": []}, {"model": {"name": None}}, {"config": {"max_steps": "many"}}]
)
def test_a_foreign_manifest_says_nothing(found, tmp_path):
    told = about_of(tmp_path, found)
    assert (told["model"], told["steps"]) == (None, None)


def test_the_time_in_which_a_run_waited_to_be_resumed_is_none_of_its_own():
    start = datetime(2026, 11, 1, 12, tzinfo=timezone.utc)
    resumed = start + timedelta(days=2)
    attempts = [
        {"started": (start - timedelta(seconds=30)).isoformat()},
        {"started": resumed.isoformat()},
        {"started": "?"},
        3,
    ]
    times = start.timestamp() + np.array([0.0, 60.0, 2 * 86400 + 45, 2 * 86400 + 105])  # 45 s to load the model
    assert elapsed(times, {"attempts": attempts}).tolist() == [0, 60, 105, 165]
    assert elapsed(times, {"attempts": attempts[:1]}).tolist() == [0, 60, 172845, 172905]
    assert elapsed(np.array([9.0, 10.0, 4.0, 5.0]), {}).tolist() == [0, 1, 1, 2], "the clock was set back"
    assert elapsed(np.zeros(0), {"attempts": attempts}).tolist() == []
    told = about(
        {"attempts": attempts}, Path("none"), [], lambda name: (np.arange(4), times if name == "time" else np.zeros(4))
    )
    assert told["seconds"] == 165


def test_a_clock_that_is_set_forward_or_back_in_the_middle_adds_no_hours(tmp_path, monkeypatch):
    clock, changes = time.time, {2: 7200.0, 3: 7200.0, 5: -3600.0}
    monkeypatch.setattr(time, "time", lambda: clock() + changes.get(step, 0.0))
    step = 0
    with RunFolder.create(tmp_path / "run") as run:
        run.describe(args={})
        for step in range(1, 7):
            run.append_metrics(step, {"reward": 0.5})
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    offsets = [line.get("clock_offset") for line in lines]
    assert [None if offset is None else round(offset) for offset in offsets] == [None, 7200, 7200, None, -3600, None]
    assert lines[2]["time"] - lines[0]["time"] > 7199, "the time is the clock's all the same"
    view = RunView("run", tmp_path / "run")
    view.series.refresh()
    assert 0 <= about({}, tmp_path, [], view.series.column)["seconds"] < 3600
    assert view.series.names() == ["reward"]
    hours = curve_of(view, "reward", 100, 1, None, None, "time")["x"]
    assert hours == sorted(hours)
    assert hours[-1] < 1
