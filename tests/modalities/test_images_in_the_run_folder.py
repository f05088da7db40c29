"""Images of recorded prompts: files named by their content, bounded, and shown by the dashboard as images alone."""

import json

import pytest
import torch
from models import picture, tiny_processor

pytest.importorskip("starlette")
from starlette.testclient import TestClient

from covey.data.prompts import to_prompt
from covey.monitor.view.app import make_app
from covey.monitor.view.reading import Library
from covey.runs import previews, rollouts
from covey.types import Completion, Group


def group(uid, count):
    processor = tiny_processor("llava")
    row = {"prompt": [{"role": "user", "content": "How many?"}], "image": picture(count), "answer": "3"}
    prompt = to_prompt(row, uid, "row", processor.tokenizer, {}, processor)
    done = Completion(token_ids=torch.tensor([5, 2]), text="3", finish="stop")
    return Group(prompt=prompt, completions=(done, done), rewards=torch.ones(2, 1))


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    groups = [group("0:0", 2), group("0:1", 3), group("0:2", 2)]
    rollouts.write(folder / "rollouts", 1, groups, ["r"])
    previews.write(folder / "rollouts", groups)
    (folder / "run.json").write_text(json.dumps({"schema": 1, "state": "finished"}))
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 1.0}\n')
    return folder


def test_each_image_is_written_once_and_named_in_the_file(run):
    rows = rollouts.read(run / "rollouts" / "step-000001.parquet")
    names = {name for row in rows for name in json.loads(row["images"])}
    assert names == {path.name for path in (run / "rollouts" / "images").iterdir()}
    assert len(names) == 2
    assert json.loads(rows[0]["columns"]) == {"answer": "3"}


def test_a_run_keeps_a_bounded_number_of_images(tmp_path, monkeypatch):
    monkeypatch.setattr(previews, "MOST_FILES", 1)
    previews.write(tmp_path, [group("0:0", 2), group("0:1", 3)])
    assert len(list((tmp_path / "images").iterdir())) == 1


def test_the_dashboard_gives_images_by_name_and_nothing_else(run):
    client = TestClient(make_app(Library([run.parent]), watch=False), base_url="http://localhost")
    name = client.get("/api/runs").json()["runs"][0][
        "run" if "run" in client.get("/api/runs").json()["runs"][0] else "name"
    ]
    library_group = client.get("/api/rollout", params={"run": name, "step": 1, "group": 0}).json()
    (image,) = library_group["media"]
    found = client.get("/api/media", params={"run": name, "name": image})
    assert found.status_code == 200
    assert found.headers["content-type"] == "image/png"
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.content.startswith(b"\x89PNG")
    for other in ("../../run.json", "run.json", image.replace(".png", ".svg"), "0" * 24 + ".png"):
        assert client.get("/api/media", params={"run": name, "name": other}).status_code == 404
    (run / "rollouts" / "images" / image).write_bytes(b"<svg onload=alert(1)>")
    assert client.get("/api/media", params={"run": name, "name": image}).status_code == 404
