"""Live sources: every row once, in order, whatever dies: the source, the step, the run."""

from __future__ import annotations

import http.server
import json
import threading
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import IterableDataset
from PIL import Image

from covey.data import follow, load
from covey.data.live.order import HeldOut, LiveOrder
from covey.data.stream import PromptStream
from covey.errors import DataError
from kit import http_server, tiny_tokenizer


def rows(*numbers: int, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"question {n}", **more} for n in numbers]


def append(path: Path, items: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(item) + "\n" for item in items)


def prompts(order: LiveOrder, n: int) -> list[str]:
    return [order.next()[1]["prompt"] for _ in range(n)]


class Memory:
    """A source over a list, as a user writes one; it can be away, and deliver twice."""

    def __init__(self, items: list[dict[str, Any]]) -> None:
        self.items, self.committed, self.failures, self.asked = items, -1, 0, list[int]()

    def poll(self, after: int | None, limit: int) -> list[tuple[int, Mapping[str, Any]]]:
        self.asked.append(limit)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("refused")
        start = 0 if after is None else after + 1
        return [(i, self.items[i]) for i in range(start, min(start + limit, len(self.items)))]

    def commit(self, position: int) -> None:
        self.committed = position


def order_of(source: Any, **options: Any) -> LiveOrder:
    replay = options.pop("replay", None)
    dataset = follow(source, **options)
    dataset.poll_seconds, dataset.timeout_seconds = 0.01, 0.3
    return LiveOrder(dataset, seed=0, replay=replay)


def test_a_source_that_fails_ends_every_rank(caplog):
    """The main process reads; the others wait for what it reads, and would wait for ever."""

    class Broken(Memory):
        def poll(self, after: int | None, limit: int) -> list[tuple[int, Mapping[str, Any]]]:
            raise KeyError("question")

    sent: list[Any] = []
    main, other = order_of(Broken([])), order_of(Broken([]))
    main.dataset.share = lambda item: sent.append(item) or item
    other.dataset.share, other.dataset.is_main = lambda item: sent[0], False
    for order in (main, other):
        with pytest.raises(DataError, match=r"Broken failed in poll\(\): KeyError: 'question'"):
            order.next()
    assert "Traceback" in caplog.text  # the user's own code, of the rank that has run it


def test_a_file_that_grows(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    order = order_of(path)
    with pytest.raises(DataError, match=r"No prompt came from .*prompts.jsonl for \d s \(live_timeout_seconds=0.3\)"):
        order.next()  # it is not there yet
    append(path, rows(0, 1))
    assert prompts(order, 2) == ["question 0", "question 1"]
    with path.open("a") as file:
        file.write('{"prompt": "half')  # a line that is still being written
    with pytest.raises(DataError, match="No prompt came"):
        order.next()
    with path.open("a") as file:
        file.write(' of it"}\n')
    assert prompts(order, 1) == ["half of it"]
    path.write_text("")  # replaced
    append(path, rows(7))
    assert prompts(order, 1) == ["question 7"]


def test_a_file_that_is_not_there_yet_is_said_once_and_begins_without_a_pause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    append(tmp_path / "prompts.jsonl", rows(0))
    order = order_of(tmp_path / "promts.jsonl")
    (said,) = (record.message for record in caplog.records)
    assert said.endswith(
        "promts.jsonl does not exist yet; training waits until it is there. Did you mean prompts.jsonl?"
    )
    threading.Timer(0.1, append, (tmp_path / "promts.jsonl", rows(1))).start()
    assert prompts(order, 1) == ["question 1"]  # within the 0.3 s of live_timeout_seconds
    assert len(caplog.records) == 1


def test_a_folder_takes_files_whenever_they_come(tmp_path: Path):
    append(tmp_path / "b.jsonl", rows(0))
    order = order_of(tmp_path)
    assert prompts(order, 1) == ["question 0"]
    append(tmp_path / "a.jsonl", rows(1, 2))
    append(tmp_path / "b.jsonl", rows(3))
    assert sorted(prompts(order, 3)) == ["question 1", "question 2", "question 3"]


def test_files_that_end_without_a_line_break_are_read_whole(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows(0, 1)))
    (tmp_path / "b.ndjson").write_text(json.dumps(rows(2)[0]))
    order = order_of(tmp_path)
    assert prompts(order, 3) == ["question 0", "question 1", "question 2"]
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("\n" + json.dumps(rows(3)[0]) + "\n")
    assert prompts(order, 1) == ["question 3"]


def test_an_iterable_and_a_step_that_is_undone():
    order = order_of(IterableDataset.from_generator(lambda: iter(rows(*range(10)))))
    prompts(order, 3)
    before = order.state_dict()
    assert prompts(order, 3) == ["question 3", "question 4", "question 5"]
    order.load_state_dict(before)
    assert prompts(order, 7) == [f"question {n}" for n in range(3, 10)]
    with pytest.raises(DataError, match=r"has ended after 10 prompts"):
        order.next()
    again = order_of(IterableDataset.from_generator(lambda: iter(rows(*range(10)))))  # as in a new process
    again.load_state_dict(before)
    assert prompts(again, 2) == ["question 3", "question 4"]


def test_rows_that_come_twice_are_taken_once_also_after_a_resume():
    source = Memory([*rows(0, 1, 0, 2), *rows(2, 1, 3)])
    order = order_of(source)
    assert prompts(order, 3) == ["question 0", "question 1", "question 2"]
    again = order_of(source)
    again.load_state_dict(json.loads(json.dumps(order.state_dict())))
    assert prompts(again, 1) == ["question 3"]
    ids = order_of(Memory([{"prompt": "a", "id": 1}, {"prompt": "b", "id": 1}, {"prompt": "a", "id": 2}]))
    assert prompts(ids, 2) == ["a", "a"]


def test_ids_of_several_rows_are_named_once(caplog: pytest.LogCaptureFixture):
    given = [{**row, "id": "math"} for row in rows(*range(4))]
    more = [{**row, "id": "code"} for row in rows(5, 6)]
    order = order_of([given[0], given[0], *given[1:], *more, *rows(9)])
    assert prompts(order, 3) == ["question 0", "question 5", "question 9"]
    (said,) = (record.message for record in caplog.records)
    assert "has rows with the id of an earlier row and other content, such as 'math'" in said


def test_no_more_is_taken_than_the_buffer_holds():
    source = Memory(rows(*range(1000)))
    order = order_of(source, buffer=8)
    prompts(order, 17)
    assert source.asked == [8, 8, 8]
    assert len(order._waiting) == 7


def test_a_source_that_dies_and_returns(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("covey.data.live.order._FIRST_PAUSE", 0.01)
    source = Memory(rows(0))
    source.failures = 3
    assert prompts(order_of(source), 1) == ["question 0"]
    said = [record.message for record in caplog.records]
    assert said == ["Memory is away (refused); training waits and tries again.", "Memory is back."]


def test_rows_that_cannot_be_used_are_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{broken\n[1]\n{"prompt": ""}\n\n{"prompt": "held out"}\n{"prompt": "b"}\n')
    order = order_of(path)
    order.dataset.is_held_out = HeldOut([datasets.Dataset.from_dict({"prompt": ["held out"]})])
    assert prompts(order, 2) == ["a", "b"]
    said = " ".join(record.message for record in caplog.records)
    assert order.state_dict()["left_out"] == 4
    assert "byte 16 is no JSON" in said
    assert "is a prompt of the evaluation set" in said


def test_a_held_out_conversation_is_known_where_its_set_has_filled_nulls_in():
    held_out = [[{"role": "user", "content": "held out"}], [{"role": "user", "content": "other", "name": "Ann"}]]
    order = order_of([{"prompt": held_out[0]}, *rows(1)])
    order.dataset.is_held_out = HeldOut([datasets.Dataset.from_dict({"prompt": held_out})])
    assert prompts(order, 1) == ["question 1"]


def test_a_prompt_about_another_image_than_the_held_out_one_is_trained_on(tmp_path: Path):
    paths = [str(tmp_path / f"{color}.png") for color in ("red", "blue")]
    for path in paths:
        Image.new("RGB", (8, 8), Path(path).stem).save(path)
    ask = "What is it?"
    live = [{"prompt": ask, "image": paths[0]}, {"prompt": ask, "images": [paths[1]]}, {"prompt": ask}]
    order = order_of([*live, {"prompt": ask, "image": str(tmp_path / "gone.png")}, *rows(1)])
    evaluation = datasets.Dataset.from_dict({"prompt": [ask], "images": [[paths[0]]]})
    evaluation = evaluation.cast_column(
        "images", datasets.Sequence(datasets.Image())
    )  # opened, where the live row has a path
    order.dataset.is_held_out = HeldOut([datasets.Dataset.from_dict({"prompt": ["other"]}), evaluation])
    assert [order.next()[1] for _ in range(3)] == [*live[1:], *rows(1)]
    assert order.state_dict()["left_out"] == 2


def test_replay_mixes_in_a_share_of_all_earlier_rows():
    order = order_of(Memory(rows(*range(3000))), replay=0.25, replay_rows=100)
    drawn = [order.next()[0] for _ in range(2000)]
    replays = [int(uid.partition(":")[2]) for uid in drawn if uid.startswith("r")]
    assert len(replays) == 500
    late = Counter(number // 300 for number in replays[-250:])  # 1,500 rows had come: each part of them is seen
    assert all(late[part] for part in range(4))
    state = json.loads(json.dumps(order.state_dict()))
    again = order_of(Memory(rows(*range(3000))), replay=0.25, replay_rows=100)
    again.load_state_dict(state)
    assert [again.next()[0] for _ in range(50)] == [order.next()[0] for _ in range(50)]


@contextmanager
def queue(items: list[dict[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """A queue over HTTP on this machine: its address, and what was committed."""
    committed: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/moved"):
                self.move(self.path.replace("moved", "prompts"))
                return
            asked = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
            start = json.loads(asked.get("after", "0"))
            found = [
                {"position": i + 1, "row": items[i]} for i in range(start, min(start + int(asked["limit"]), len(items)))
            ]
            self.answer(json.dumps(found).encode())

        def do_POST(self) -> None:
            if self.path == "/moved":
                self.move("/prompts")
                return
            committed.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["commit"])
            self.answer(b"{}")

        def move(self, place: str) -> None:
            self.send_response(301)
            self.send_header("Location", place)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None: ...

    with http_server(Handler) as address:
        yield f"{address}/prompts", committed


def test_a_queue_over_http_that_is_away_for_a_while(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("covey.data.live.order._FIRST_PAUSE", 0.01)
    items = rows(0, 1)
    with queue(items) as (url, committed):
        order = order_of(url)
        assert prompts(order, 2) == ["question 0", "question 1"]
        order.commit(order.state_dict())
        assert committed == [2]
    with pytest.raises(DataError, match=f"No prompt came from {url}"):
        order.next()


def test_rows_are_followed_where_they_moved_to_and_a_commit_that_is_redirected_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which this machine's own addresses are not asked through
    monkeypatch.delenv("no_proxy", raising=False)
    with queue(rows(0)) as (url, committed):
        order = order_of(url.replace("prompts", "moved"))
        assert prompts(order, 1) == ["question 0"]
        order.commit(order.state_dict())
    assert committed == []
    assert "took no commit (HTTP Error 301" in caplog.text


def test_names_of_the_command_line_and_what_is_refused(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    append(path, [{"question": "why", "solution": "because"}])
    dataset = load(
        f"follow:{path}", prompt_column="question", columns={"answer": "solution"}, system_prompt="Think.", live=True
    )
    assert dataset.column_names == ["prompt", "answer"]
    stream = PromptStream(dataset, tiny_tokenizer())
    assert stream.take(1)[0].messages[0]["content"] == "Think."
    for name, said in (
        ("follow:nowhere/prompts.jsonl", "there is no folder 'nowhere'"),
        ("follow:prompts.csv", "is no JSON Lines file"),
        ("follow:", "names no source"),
        (f"follow:{path}:train", "has no splits; write follow:.*prompts.jsonl"),
        (f"follow:{tmp_path}/prompts", "There is nothing of that name here. Did you mean prompts.jsonl"),
        (f"0.5*follow:{path} + 0.5*demo", "cannot be mixed"),
    ):
        with pytest.raises(DataError, match=said):
            load(name, live=True)
    with pytest.raises(DataError, match="is a live source, which has no end"):
        load(f"follow:{path}")
    with pytest.raises(DataError, match="a live source takes none or replay"):
        PromptStream(follow(path), tiny_tokenizer(), curriculum="frontier")


def test_a_source_of_ones_own_by_import_path(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "class Numbers:\n"
        "    def poll(self, after, limit):\n"
        "        start = 0 if after is None else after\n"
        "        return [(n + 1, {'prompt': f'number {n}'}) for n in range(start, min(start + limit, 5))]\n"
        "    def commit(self, position): ...\n"
    )
    order = order_of(f"{tmp_path / 'mine.py'}:Numbers")
    assert prompts(order, 5)[-1] == "number 4"
