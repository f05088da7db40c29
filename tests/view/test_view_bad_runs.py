"""One bad run neither hides nor stops the others, whatever lies in its folder; and nothing outside it is read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bad_runs import BAD, OUTSIDE

from covey.monitor.view import Library
from covey.monitor.view.reading import find_runs
from covey.runs import RunFolder
from covey.runs.metrics import JsonLines
from kit import resident, rest_nightly

ROUTES = ("series?metric=reward&seeds=1&x=tokens", "series?metric=eval_reward&x=time", "values?metric=reward", "alerts?", "rollouts?",
          "rollouts?search=x", "rollout?step=1&group=0", "rollout?step=2&group=0", "rollout?step=3&group=0", "spread?", "phases?",
          "facts?", "diff?run=good")  # fmt: skip
MOST_MEGABYTES = 700
LARGE = (
    "a hundred thousand metrics, each in a line of its own",
    "many metrics, then a million short lines",
    "a line without end of 60 MB",
    "a manifest of 40 MB",
)


def good(folder: Path) -> None:
    run = RunFolder.create(folder)
    run.describe(args={"seed": 0})
    for step in (1, 2, 3):
        run.append_metrics(step, {"reward": step / 4, "num_tokens": 10.0}, {"step": 1.0})
    run.close()


@pytest.fixture(params=rest_nightly(BAD, [name for name in BAD if name not in LARGE][::4]))
def beside(request: Any, tmp_path: Path) -> Iterator[Path]:
    """A folder with a good run and a bad one."""
    runs = tmp_path / "runs"
    good(runs / "good")
    (runs / "bad").mkdir()
    BAD[request.param](runs / "bad")
    yield runs
    if (runs / "bad").is_dir():
        (runs / "bad").chmod(0o700)


def test_the_good_run_is_whole_beside_a_bad_one(beside: Path, served: Callable[..., Any]) -> None:
    library = Library([beside])
    library.refresh()
    with served(library) as client:
        for route in ROUTES:
            status, _, body = client.ask(f"/api/{route}&run=bad")
            assert status in (200, 404, 422), (route, body[:300])
            assert OUTSIDE.encode() not in body
            assert b"666.0" not in body
            assert len(body) < 10e6
        told = client.get("runs")["runs"]
        assert OUTSIDE not in json.dumps(told)
        (row,) = (run for run in told if run["name"] == "good")
        assert (row["step"], row["state"], row["troubles"]) == (3, "finished", [])
        both = [run["name"] for run in told]
        for curve in client.get("series", run=both, metric="reward")["curves"]:
            if curve["run"] == "good":
                assert curve["values"] == [0.25, 0.5, 0.75]
        assert client.ask(f"/api/alerts?{urllib.parse.urlencode({'run': both}, doseq=True)}")[0] == 200
        assert client.get("facts", run="good")["manifest"]["config"] == {"seed": 0}


def test_what_cannot_be_read_is_a_sentence_beside_the_run(tmp_path: Path) -> None:
    for name in (
        "pipes in place of files",
        "folders in place of files",
        "links to a file outside",
        "lines nested 500 deep",
    ):
        (tmp_path / "runs" / name).mkdir(parents=True)
        BAD[name](tmp_path / "runs" / name)
    library = Library([tmp_path / "runs"])
    library.refresh()
    for run in library.find():
        told = run.overview()["troubles"]
        assert any(said.startswith("run.json cannot be read: ") for said in told), run.name
        assert all(said.endswith(".") and "\n" not in said for said in told)


@pytest.mark.nightly
def test_a_server_of_all_bad_runs_stays_small_and_answers(tmp_path: Path, client_of: Callable[[str], Any]) -> None:
    runs = tmp_path / "runs"
    good(runs / "good")
    for at, make in enumerate(BAD.values()):
        (runs / f"bad-{at}").mkdir()
        make(runs / f"bad-{at}")
    code = "import sys; from covey.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "view", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split(" at ")[1].split()[0]
            client = client_of(address.rstrip("/"))
            left = True
            while left:
                told = client.get("runs")["runs"]
                left = any(
                    run["indexed"]["bytes"] < run["indexed"]["of"] or run["indexed"]["files_left"] for run in told
                )
                time.sleep(0.5)
            (row,) = (run for run in told if run["name"] == "good")
            assert row["step"] == 3
            assert resident("VmHWM", server.pid) < MOST_MEGABYTES
        finally:
            server.send_signal(signal.SIGINT)


def test_a_file_that_becomes_a_pipe_while_the_server_runs_stops_nothing(
    tmp_path: Path, served: Callable[..., Any]
) -> None:
    good(tmp_path / "good")
    good(tmp_path / "bad")
    library = Library([tmp_path])
    with served(library, watch=True) as client:
        while client.get("series", run="bad", metric="reward")["curves"][0]["total"] < 3:
            time.sleep(0.05)
        (tmp_path / "bad" / "metrics.jsonl").unlink()
        os.mkfifo(tmp_path / "bad" / "metrics.jsonl")
        JsonLines(tmp_path / "good" / "metrics.jsonl").append({"step": 4, "reward": 1.0})
        while client.get("series", run="good", metric="reward")["curves"][0]["total"] < 4:
            time.sleep(0.05)


NAMES = [
    "<img src=x onerror=alert(1)>",
    "a b",
    "ü 漢字",
    "%2e%2e",
    "__proto__",
    "a&run=b#x?",
    "'\"",
    "=1+1",
    "x" * 200,
    "line\nbreak",
]


def test_runs_of_any_name_are_shown_by_it(tmp_path: Path, served: Callable[..., Any]) -> None:
    names = [*NAMES, os.fsdecode(b"\xff\xfe")]
    for name in names:
        good(tmp_path / name)
    library = Library([tmp_path])
    library.refresh()
    with served(library) as client:
        told = [run["name"] for run in client.get("runs")["runs"]]
        assert set(NAMES) < set(told)
        for name in told:
            assert client.get("series", run=name, metric="reward")["curves"][0]["values"] == [0.25, 0.5, 0.75]
        assert "'=1+1: reward" in client.ask("/api/values?run=%3D1%2B1&metric=reward")[2].decode()


@pytest.mark.nightly
def test_three_thousand_runs_are_listed(tmp_path: Path, served: Callable[..., Any]) -> None:
    for at in range(3000):
        (tmp_path / f"{at % 3}" / f"run-{at // 3}").mkdir(parents=True)
        (tmp_path / f"{at % 3}" / f"run-{at // 3}" / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    library = Library([tmp_path])
    library.refresh()
    with served(library) as client:
        told = client.get("runs")["runs"]
        assert len({run["name"] for run in told}) == 3000
        assert {run["last"]["reward"] for run in told} == {0.5}


def test_a_run_behind_a_link_of_the_users_own_is_shown_once(tmp_path: Path) -> None:
    good(tmp_path / "disk" / "far")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "disk" / "far")
    (tmp_path / "runs" / "latest").symlink_to("linked")
    assert list(find_runs([tmp_path / "runs"]).values()) == [tmp_path / "disk" / "far"]
