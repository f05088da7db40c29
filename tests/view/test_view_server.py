"""What the server answers about real runs: curves, completions with their tokens, differences; and whom it answers."""

from __future__ import annotations

import json
import math
import mimetypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.monitor.view import Library, app
from covey.monitor.view.token_text import tokenizer_file
from covey.runs import manifest, metrics, rollouts
from covey.runs.metrics import JsonLines


def test_every_run_below_the_folder_is_listed_with_its_state(client: Any) -> None:
    found = {run["name"]: run for run in client.get("runs")["runs"]}
    assert set(found) == {"first", "second"}
    assert found["first"]["state"] == "finished"
    assert found["first"]["step"] == 4
    assert "reward" in found["first"]["metrics"]


def test_a_curve_holds_the_values_of_the_file(client: Any, runs: Path) -> None:
    rows = metrics.read(runs / "first" / "metrics.jsonl")
    curve = client.get("series", run="first", metric="reward")["curves"][0]
    assert curve["steps"] == [row["step"] for row in rows]
    assert curve["values"] == [row["reward"] for row in rows]
    assert (curve["hidden"], curve["total"]) == (0, 4)
    assert client.get("series", run="first", metric="reward", **{"from": 4, "to": 2})["curves"][0]["hidden"] == 0


def test_names_beyond_what_is_shown_are_not_looked_up(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []
    get = Library.get
    monkeypatch.setattr(Library, "get", lambda self, name: looked_up.append(name) or get(self, name))
    many = [f"metric{i}" for i in range(500)]
    for path in ("series", "values"):
        client.ask(f"/api/{path}?" + "&".join([*(f"metric={name}" for name in many), *["run=first"] * 500]))
        assert 0 < len(looked_up) <= 64, path
        looked_up.clear()


def test_two_runs_and_two_metrics_are_four_curves(client: Any) -> None:
    curves = client.get("series", run=["first", "second"], metric=["reward", "loss"])["curves"]
    assert [(curve["run"], curve["metric"]) for curve in curves] == [
        *(("first", "reward"), ("second", "reward")),
        *(("first", "loss"), ("second", "loss")),
    ]


def test_alerts_of_several_runs_are_in_the_order_of_their_steps(client: Any, runs: Path) -> None:
    for name, steps in (("first", (3, 40)), ("second", (1, 20))):
        for step in steps:
            JsonLines(runs / name / "alerts.jsonl").append({"step": step, "rule": "planted", "said": "x"})
    alerts = [row for row in client.get("alerts", run=["first", "second"])["alerts"] if row["rule"] == "planted"]
    for name in ("first", "second"):  # other tests read them too
        path = runs / name / "alerts.jsonl"
        path.write_text("".join(line for line in path.read_text().splitlines(True) if "planted" not in line))
    assert [(row["step"], row["run"]) for row in alerts] == [(1, "second"), (3, "first"), (20, "second"), (40, "first")]


def test_the_list_of_groups_is_newest_first_with_the_prompts(client: Any) -> None:
    found = client.get("rollouts", run="first")
    assert [row["step"] for row in found["rows"]] == [4, 4, 2, 2, 1, 1]
    assert found["completions"] == 24
    assert all(row["prompt"].startswith("Tom has") for row in found["rows"])
    assert found["next"] is None


def test_a_list_comes_in_parts(client: Any) -> None:
    first = client.get("rollouts", run="first", most=4)
    rest = client.get("rollouts", run="first", most=4, start=first["next"])
    assert (len(first["rows"]), len(rest["rows"]), rest["next"]) == (4, 2, None)


def test_groups_are_sorted_and_filtered_by_their_rewards(client: Any, runs: Path) -> None:
    written = [
        row for step in (1, 2, 4) for row in rollouts.read(runs / "first" / "rollouts" / f"step-{step:06d}.parquet")
    ]
    best = max(row["reward"] for row in written)
    rows = client.get("rollouts", run="first", sort="highest reward")["rows"]
    assert rows[0]["highest"] == pytest.approx(best)
    found = client.get("rollouts", run="first", min_reward=best - 1e-3)["rows"]
    assert found
    assert all(row["highest"] >= best - 1e-2 for row in found)


def test_a_search_finds_every_group_that_contains_the_text(client: Any, runs: Path) -> None:
    written = [
        row for step in (1, 2, 4) for row in rollouts.read(runs / "first" / "rollouts" / f"step-{step:06d}.parquet")
    ]
    word = "TOM HAS 2"
    expected = {
        (row["step"], row["group"]) for row in written if word.lower() in (row["prompt"] + row["completion"]).lower()
    }
    found, start = set(), 0
    while start is not None:
        part = client.get("rollouts", run="first", search=word, start=start)
        found |= {(row["step"], row["group"]) for row in part["rows"]}
        start = part["next"]
    assert found == expected
    assert found


def test_the_tokenizer_of_a_relative_model_is_looked_for_where_the_run_began(tmp_path: Path, monkeypatch: Any) -> None:
    run = tmp_path / "run"
    for folder in (run, tmp_path / "there" / "model", tmp_path / "here" / "model"):
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").touch()
    facts = {"format": manifest.FORMAT, "config": {"model": "model"}, "working_folder": str(tmp_path / "there")}
    (run / "run.json").write_text(json.dumps(facts))
    monkeypatch.chdir(tmp_path / "here")
    assert tokenizer_file(run) == tmp_path / "there" / "model" / "tokenizer.json"
    (run / "run.json").write_text(json.dumps({**facts, "working_folder": None}))
    assert tokenizer_file(run) is None


def test_a_group_shows_each_token_with_its_numbers(client: Any, runs: Path) -> None:
    group = client.get("rollout", run="first", step=4, group=1)
    written = [row for row in rollouts.read(runs / "first" / "rollouts" / "step-000004.parquet") if row["group"] == 1]
    assert [one["completion"] for one in group["completions"]] == [row["completion"] for row in written]
    for one, row in zip(group["completions"], written, strict=True):
        assert one["token_ids"] == row["token_ids"]
        assert len(one["pieces"]) == len(row["token_ids"])
        assert one["per_token"]["logprobs"] == pytest.approx(row["logprobs"])
        assert set(one["rewards"]) == {"share_of_e", "length"}
        assert (
            "".join(one["pieces"]).replace("<|endoftext|>", "") == row["completion"]
        )  # which leaves special tokens out


def test_the_spread_of_rewards_has_a_row_for_each_step(client: Any) -> None:
    found = client.get("spread", run="first")
    assert found["steps"] == [1, 2, 4]
    assert all(sorted(row) == row for row in found["quantiles"])


def test_the_difference_of_two_runs_is_what_was_changed(client: Any) -> None:
    rows = {row["name"]: row["values"] for row in client.get("diff", run=["first", "second"])["rows"]}
    assert rows["config.learning_rate"] == [0.01, 0.001]
    assert "config.max_steps" not in rows


@pytest.mark.parametrize(
    "call",
    [
        "series?run=none&metric=reward",
        "rollouts?run=../first",
        "rollout?run=first&step=99&group=0",
        "rollout?run=first&step=4&group=99",
        "facts?run=/etc",
    ],
)
def test_what_is_not_there_is_a_sentence(client: Any, call: str) -> None:
    status, _, body = client.ask(f"/api/{call}")
    assert status == 404
    assert json.loads(body)["error"].endswith((".", "?", ")"))


@pytest.mark.parametrize(
    "call",
    ["rollouts", "rollouts?run=first&start=-1", "rollouts?run=first&sort=x", "series?points=x", "series?from=nan"],
)
def test_a_wrong_question_is_refused(client: Any, call: str) -> None:
    assert client.ask(f"/api/{call}")[0] == 400


def test_files_outside_the_page_are_not_served(client: Any) -> None:
    for path in ("/../app.py", "/%2e%2e/app.py", "/..%2fapp.py", "//etc/passwd"):
        assert client.ask(path)[0] in (400, 404)


def test_scripts_are_served_as_scripts_by_any_machine_and_from_links(
    tmp_path: Path, served: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows' registry may call them plain text, and an installation may hold links to its files."""
    (tmp_path / "page").mkdir()
    for path in (Path(app.__file__).parent / "page").glob("*.*"):
        (tmp_path / "page" / path.name).symlink_to(path)
    monkeypatch.setattr(app, "_PAGE", tmp_path / "page")
    mimetypes.add_type("text/plain", ".js")
    with served(Library([tmp_path])) as client:
        for path, kind in (("/main.js", "text/javascript"), ("/", "text/html")):
            status, headers, _ = client.ask(path)
            assert (status, headers.get_content_type()) == (200, kind)


def test_every_answer_forbids_scripts_from_elsewhere(client: Any) -> None:
    for path in ("/", "/api/runs", "/nothing"):
        _, headers, _ = client.ask(path)
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_another_name_for_this_machine_is_refused(client: Any) -> None:
    assert client.ask("/api/runs", {"Host": "evil.example"})[0] == 400
    assert client.ask("/api/runs", {"Host": "localhost:1"})[0] == 200


def test_nothing_can_be_written(client: Any) -> None:
    assert client.ask("/api/runs", method="POST")[0] == 405


def test_with_a_token_nothing_is_shown_without_it(runs: Path, served: Callable[..., Any]) -> None:
    token = "a-long-enough-token"
    with served(Library([runs]), token) as client:
        assert client.ask("/")[0] == 401
        assert client.ask("/api/runs")[0] == 401
        assert client.ask("/api/runs", {"Authorization": "Bearer wrong"})[0] == 401
        assert client.ask("/api/runs", {"Authorization": f"Bearer {token}"})[0] == 200
        status, headers, _ = client.ask(f"/?token={token}")
        assert (status, headers["location"]) == (303, "/")
        assert "HttpOnly" in headers["set-cookie"]
        assert client.ask("/api/runs", {"Cookie": headers["set-cookie"].split(";")[0]})[0] == 200


def test_a_run_that_grows_is_followed(tmp_path: Path, served: Callable[..., Any]) -> None:
    log = JsonLines(tmp_path / "run" / "metrics.jsonl") if (tmp_path / "run").mkdir() is None else None
    assert log is not None
    log.append({"step": 1, "reward": 0.5})
    library = Library([tmp_path])
    library.refresh()
    with served(library) as client:
        assert client.get("series", run="run", metric="reward")["curves"][0]["steps"] == [1]
        log.append({"step": 2, "reward": math.nan, "kl": 0.1})
        (tmp_path / "later").mkdir()
        JsonLines(tmp_path / "later" / "metrics.jsonl").append({"step": 1, "reward": 1.0})
        library.refresh()
        curve = client.get("series", run="run", metric="reward")["curves"][0]
        assert (curve["steps"], curve["values"], curve["not_finite"]) == ([1, 2], [0.5, None], 1)
        assert len(client.get("runs")["runs"]) == 2
