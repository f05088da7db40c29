"""A run that is looked at while it is written: torn lines, files half there, files replaced or dropped, and steps that keep coming."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covey.monitor.view import Library
from covey.monitor.view.app import phases_of
from covey.monitor.view.curves import smooth, thin
from covey.monitor.view.groups import FilesOnDisk, GroupIndex, select
from covey.monitor.view.series import NOT_FINITE, SeriesIndex
from covey.runs import RunFolder, rollouts
from covey.runs.metrics import JsonLines
from covey.types import Alert, Completion, Group, Prompt


def group(uid: str, rewards: list[float], text: str = "four", question: str = "2 + 2 =") -> Group:
    completions = [Completion(token_ids=torch.tensor([1, 2]), text=text, finish="stop") for _ in rewards]
    prompt = Prompt(uid=uid, token_ids=(1,), text=question)
    return Group(prompt=prompt, completions=tuple(completions), rewards=torch.tensor(rewards)[:, None])


def write(run: Path, step: int, *groups: Group) -> Path:
    return rollouts.write(run / "rollouts", step, groups, ["right"])


def test_a_torn_last_line_waits_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "reward": 0.5}\n{"step": 2, "rew')
    series = SeriesIndex(path)
    assert series.refresh()
    assert series.last_step() == 1
    assert series.done == series.size  # nothing is said to be left to read
    with path.open("ab") as file:
        file.write(b'ard": 0.75}\n')
    series.refresh()
    assert series.column("reward")[1].tolist() == [0.5, 0.75]


@pytest.mark.parametrize("seed", range(8))
def test_metrics_written_in_pieces_of_any_size_are_those_of_the_whole_file(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    log = JsonLines(tmp_path / "whole.jsonl")
    for step in range(1, 60):
        log.append({"step": step, "reward": rng.choice([0.25, float("nan"), float("inf")]), f"m{rng.randrange(3)}": 1})
    content = log.path.read_bytes()
    grown = tmp_path / "metrics.jsonl"
    grown.write_bytes(b"")
    series, at = SeriesIndex(grown), 0
    while at < len(content):
        size = rng.randrange(1, 400)
        with grown.open("ab") as file:
            file.write(content[at : at + size])
        at += size
        series.refresh(most_bytes=rng.choice([None, 100]))
    while not series.refresh():
        pass
    whole = SeriesIndex(log.path)
    whole.refresh()
    assert series.names() == whole.names()
    for name in whole.names():
        np.testing.assert_array_equal(series.column(name), whole.column(name))


@pytest.mark.parametrize("seed", range(4))
def test_damaged_lines_are_left_out_and_the_others_stay(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    lines = [json.dumps({"step": step, "reward": step / 10}).encode() for step in range(1, 40)]
    broken = set(rng.sample(range(39), 12))
    for at in broken:
        place = rng.randrange(len(lines[at]))
        lines[at] = rng.choice([b"", b"null", b"[1]", b'{"step": "x"}', b"\xff\xfe\x00", lines[at][:place]])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    series = SeriesIndex(path)
    series.refresh()
    assert series.column("reward")[0].tolist() == [at + 1 for at in range(39) if at not in broken]


def test_a_file_of_rollouts_that_is_half_there_is_named_and_read_when_it_is_whole(tmp_path: Path) -> None:
    write(tmp_path, 10, group("0:1", [1.0, 0.0]))
    content = write(tmp_path, 20, group("0:2", [1.0, 1.0])).read_bytes()
    late = tmp_path / "rollouts" / "step-000020.parquet"
    index = GroupIndex(tmp_path / "rollouts")
    for size in (0, 1, len(content) // 2, len(content) - 1):
        late.write_bytes(content[:size])
        index.refresh()
        assert list(index.unreadable) == [late.name]
        assert index.table()["step"].tolist() == [10]
        assert index.pending == 0
    late.write_bytes(content)
    index.refresh()
    assert index.unreadable == {}
    assert index.table()["step"].tolist() == [10, 20]


def test_any_damage_to_a_file_of_rollouts_leaves_the_others_to_be_seen(tmp_path: Path) -> None:
    rng = random.Random(0)
    whole = write(tmp_path, 10, group("0:1", [1.0, 0.0])).read_bytes()
    path = write(tmp_path, 20, group("0:2", [1.0, 1.0]))
    for _ in range(40):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 20)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        index = GroupIndex(tmp_path / "rollouts")
        index.refresh()
        assert 10 in index.table()["step"]


def test_files_with_other_columns_are_indexed_beside_each_other(tmp_path: Path) -> None:
    write(tmp_path, 10, group("0:1", [1.0, 0.0]))
    write(tmp_path, 20, group("0:1", [float("nan"), float("nan")]))
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"other": [1]}), tmp_path / "rollouts" / "step-000030.parquet")
    index = GroupIndex(tmp_path / "rollouts")
    index.refresh()
    assert index.table()["step"].tolist() == [10, 20]
    assert np.isnan(index.table()["reward"][1])
    assert "prompt_uid" in index.unreadable["step-000030.parquet"]


def test_the_gain_of_a_prompt_is_worked_out_across_files_whatever_order_they_come_in(tmp_path: Path) -> None:
    index = GroupIndex(tmp_path / "rollouts")
    for step, reward in ((30, 0.75), (10, 0.25), (20, 0.5)):
        write(tmp_path, step, group("0:1", [reward]), group(f"other:{step}", [1.0]))
        index.refresh()
    change = index.table()["change"].tolist()
    assert change[0] != change[0]  # never seen before
    assert (change[2], change[4]) == (0.25, 0.25)


def test_a_file_that_is_replaced_or_dropped_is_followed_with_its_search(tmp_path: Path, served: Any) -> None:
    run = tmp_path / "run"
    write(run, 10, group("0:1", [1.0], "heron"))
    write(run, 20, group("0:2", [1.0], "egret"))
    library = Library([run])
    library.refresh()
    with served(library) as client:
        found = lambda word: [row["step"] for row in client.get("rollouts", run="run", search=word)["rows"]]
        assert (found("heron"), found("egret")) == ([10], [20])
        write(run, 10, group("0:1", [0.0], "a tall egret"))
        library.refresh()
        assert (found("heron"), found("egret")) == ([], [20, 10])
        rollouts.truncate_to(run / "rollouts", 10)
        library.refresh()
        assert found("egret") == [10]
        assert client.get("rollouts", run="run")["groups"] == 1


def test_a_folder_of_many_files_is_not_listed_at_every_look(tmp_path: Path, monkeypatch: Any) -> None:
    first = write(tmp_path, 10, group("0:1", [1.0]))
    write(tmp_path, 20, group("0:1", [1.0]))
    files = FilesOnDisk(first.parent)
    assert sorted(files.marks()) == [10, 20]
    monkeypatch.setattr("covey.monitor.view.groups._MANY", 1)
    first.unlink()
    assert sorted(files.marks()) == [10, 20]
    monkeypatch.setattr("covey.monitor.view.groups._SECONDS", 0.0)
    assert sorted(files.marks()) == [20]


def test_a_file_that_grows_in_place_is_seen_at_the_next_look(tmp_path: Path) -> None:
    path = write(tmp_path, 10, group("0:1", [1.0]))
    files = FilesOnDisk(path.parent)
    before = files.marks()
    path.write_bytes(path.read_bytes() + b"more")
    assert files.marks()[10] != before[10]


def test_thinning_keeps_the_lowest_the_highest_and_every_gap() -> None:
    steps = np.arange(1.0, 10_001)
    values = np.sin(steps / 500)
    values[[123, 7000]] = (9.0, -9.0)
    values[4321] = NOT_FINITE
    places = thin(steps, values, 200)
    assert len(places) <= 620
    assert {124.0, 7001.0, 4322.0} <= set(steps[places].tolist())
    assert np.all(np.diff(places) > 0)


def test_time_by_phase_adds_up_to_the_step(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "metrics.jsonl")
    for step in range(1, 101):
        log.append({"step": step, "num_tokens": 300, "seconds/rollout": 1.0, "seconds/learn": 0.5, "seconds/step": 2.0,
                    "memory/peak": step})  # fmt: skip
    series = SeriesIndex(log.path)
    series.refresh()
    found = phases_of(series, 10)
    assert len(found["steps"]) <= 11
    assert {name: set(part) for name, part in found["seconds"].items()} == {
        "rollout": {1.0},
        "learn": {0.5},
        "other": {0.5},
    }
    assert set(found["speed"]) == {150.0}
    assert max(found["memory"]["peak"]) == 100.0


def test_a_page_that_is_open_follows_a_run_that_grows(tmp_path: Path, served: Callable[..., Any]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    log = JsonLines(run / "metrics.jsonl")
    library = Library([tmp_path])
    with served(library) as client:
        for step in range(1, 6):
            log.append({"step": step, "reward": step / 4})
            write(run, step, group("0:1", [step / 4]))
            with log.path.open("ab") as file:
                file.write(b'{"step": 99, "rew')  # the next line is under way
            library.refresh()
            curve = client.get("series", run="run", metric="reward")["curves"][0]
            assert curve["values"] == [n / 4 for n in range(1, step + 1)]
            assert [row["step"] for row in client.get("rollouts", run="run")["rows"]] == list(range(step, 0, -1))
            log = JsonLines(log.path)  # which takes the torn line away


def test_rewards_that_are_equal_do_not_differ_whatever_the_rounding_of_their_mean(tmp_path: Path) -> None:
    groups = [group("0:1", [1.0, 1.0, 1.0]), group("0:2", [1.0, 1.0, 0.0])]
    rollouts.write(tmp_path / "rollouts", 10, groups, ["right"], weights=[0.1])  # three times 0.1 is not 0.3
    index = GroupIndex(tmp_path / "rollouts")
    index.refresh()
    table = index.table()
    assert table["group"][select(table, {"signal": True}, "newest")].tolist() == [1]


@pytest.mark.parametrize("window", [2, 3, 10, 64, 200])
def test_a_smoothed_curve_is_the_mean_of_its_window_after_any_spike(window):
    values = np.random.default_rng(0).normal(size=100)
    values[[5, 40]], values[[7, 50]] = 1e20, np.inf
    smoothed = smooth(values, window)
    for place in range(100):
        part = values[max(0, place - window + 1) : place + 1]
        expected = part[np.isfinite(part)].mean() if np.isfinite(values[place]) else np.inf
        assert smoothed[place] == pytest.approx(expected, rel=1e-12)


def prompts_of(library: Library) -> list[str]:
    rows = library.get("run").prompts.rows(state="all", sort="last seen", threshold=None, start=0, most=9)["rows"]
    return [row["prompt"] for row in rows]


def test_a_step_that_is_written_again_shows_its_new_prompts(tmp_path: Path) -> None:
    """A resume with other data draws the same places of another data set."""
    library = Library([tmp_path / "run"])
    for question in ("2 + 2 =", "an altogether different question"):
        write(tmp_path / "run", 1, group("0:0", [1.0, 0.0], question=question))
        library.refresh()
        assert prompts_of(library) == [question]


def recorded(folder: Path, name: str, steps: int) -> None:
    """A run with an identity of its own."""
    run = RunFolder.create(folder)
    run.describe(args={"seed": 1})
    for step in range(1, steps + 1):
        run.append_metrics(step, {name: 1.0})
    run.write_rollouts(1, [group("0:0", [1.0, 0.0], question=name)], ["right"])
    run.append_alert(Alert(rule=name, severity="warning", said=name, step=1))
    run.close()


@pytest.mark.filterwarnings("ignore:.*held a run already")
@pytest.mark.parametrize("is_moved", [True, False])
def test_no_row_of_a_run_is_shown_under_the_name_of_another_in_its_place(
    tmp_path: Path, served: Callable[..., Any], is_moved: bool
) -> None:
    recorded(tmp_path / "runs" / "run", "of the first", steps=4)
    library = Library([tmp_path / "runs"])
    library.refresh()
    with served(library) as client:
        assert client.get("runs")["runs"][0]["metrics"] == ["of the first"]
        if is_moved:
            shutil.move(tmp_path / "runs" / "run", tmp_path / "earlier")
        recorded(tmp_path / "runs" / "run", "of the second", steps=9)  # else the first is set aside
        told = {call: json.dumps(client.get(call, run="run", metric="of the first")) for call in
                ("series", "rollouts", "prompts", "lengths", "spread", "alerts", "runs")}  # fmt: skip
        assert [call for call, answer in told.items() if '"of the first"' in answer and call != "series"] == []
        assert json.loads(told["series"])["curves"][0]["values"] == []
        assert json.loads(told["prompts"])["prompts"] == json.loads(told["rollouts"])["groups"] == 0
        library.refresh()
        assert prompts_of(library) == ["of the second"]
        assert client.get("runs")["runs"][0]["metrics"] == ["of the second"]


def test_a_run_that_appears_and_goes_while_it_is_asked_for_is_there_or_not(tmp_path: Path) -> None:
    """`find` of one request takes runs away between two lines of another."""

    class Vanishing(dict[str, Any]):
        def __contains__(self, name: object) -> bool:
            found = super().__contains__(name)
            self.pop(name, None)
            return found

    recorded(tmp_path / "run", "reward", steps=1)
    library = Library([tmp_path])
    library._runs = Vanishing(library._runs)
    assert library.get("run").name == "run"
