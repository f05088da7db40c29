"""Files of a run that grow, are replaced or vanish between two looks of the view."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from covey.monitor.view import samples as sampling
from covey.monitor.view import search as searching
from covey.monitor.view.groups import GroupIndex
from covey.monitor.view.latest import Latest
from covey.monitor.view.reading import HeldOut
from covey.monitor.view.records import Records, event_of
from covey.monitor.view.samples import Samples


def replaced(path: Path) -> None:
    path.with_suffix(".new").write_bytes(b"second")
    os.replace(path.with_suffix(".new"), path)


def grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b" and more")


@pytest.mark.parametrize(
    "happens, expected",
    [(replaced, b"second"), (grown, b"first and more"), (Path.unlink, None)],
    ids=["replaced", "grown", "vanished"],
)
@pytest.mark.parametrize("is_read_first", [True, False])
def test_a_change_while_a_file_is_read_is_seen_by_the_next_look(
    happens: Callable[[Path], None], expected: bytes | None, is_read_first: bool, tmp_path: Path
) -> None:
    path, events = tmp_path / "file", [happens]
    path.write_bytes(b"first")

    def parse(file: BinaryIO) -> bytes:
        content = file.read() if is_read_first else b""
        for event in events:
            event(path)
        events.clear()
        return content if is_read_first else file.read()

    latest = Latest(path, parse)
    assert latest.read().content in (b"first", b"first and more")  # whole, of one version
    assert latest.read().content == expected
    assert latest.read().trouble is None


def test_an_error_of_the_disk_passes_and_damage_is_not_read_again(tmp_path: Path) -> None:
    path, raised = tmp_path / "file", [OSError(errno.EIO, "Input/output error"), ValueError("no format of ours")]
    path.write_bytes(b"first")

    def parse(file: BinaryIO) -> bytes:
        if raised:
            raise raised.pop(0)
        return file.read()

    latest = Latest(path, parse)
    assert latest.read().trouble == "Input/output error"
    assert latest.read().trouble == "no format of ours"
    assert latest.read().trouble == "no format of ours"  # it is what the file holds
    replaced(path)
    assert (latest.read().content, latest.last.trouble) == (b"second", None)


def test_a_log_that_cannot_be_read_is_told_before_its_rows_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    assert "is a folder" in str(Records(tmp_path / "events.jsonl", event_of).trouble)


def test_a_damaged_evaluation_that_a_resume_drops_is_not_told_any_more(tmp_path: Path) -> None:
    path = tmp_path / "eval" / "step-000004.parquet"
    path.parent.mkdir()
    path.write_bytes(b"PAR1 and no more")
    held_out = HeldOut(tmp_path)
    assert held_out.interval("eval_reward", 4) is None
    assert list(held_out.unreadable) == ["eval/step-000004.parquet"]
    path.unlink()
    assert held_out.unreadable == {}


def write(index: GroupIndex, step: int, text: str) -> None:
    index.folder.mkdir(exist_ok=True)
    row = {"group": 0, "prompt_uid": "0:0", "finish": "stop", "num_tokens": 1, "reward": 1.0, "advantage": 0.0}
    path = index.path_of(step)
    pq.write_table(pa.Table.from_pylist([{**row, "prompt": text, "completion": text}]), path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def num_hits(index: GroupIndex, text: str) -> int:
    table = index.table()
    return len(searching.search(index, table, searching.np.arange(len(table)), text).places)


def test_a_step_that_is_written_again_during_a_search_is_searched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = GroupIndex(tmp_path / "rollouts")
    write(index, 1, "apples")
    index.refresh()
    real = searching._groups_with

    def meanwhile(path: Path, text: str) -> frozenset[int]:
        groups = real(path, text)
        if len(index.table()) and "pears" not in path.read_bytes().decode(errors="replace"):
            write(index, 1, "many pears")
            index.refresh()
        return groups

    monkeypatch.setattr(searching, "_groups_with", meanwhile)
    assert num_hits(index, "pears") == 0
    assert num_hits(index, "pears") == 1


def test_a_step_that_is_dropped_while_it_is_sampled_is_not_told_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = GroupIndex(tmp_path / "rollouts")
    write(index, 1, "apples")
    index.refresh()

    def dropped(*args: object, **options: object) -> None:
        index.path_of(1).unlink()
        index.refresh()
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(sampling, "sample_of", dropped)
    assert Samples(index).read(4, None, None)[0] == {}
    assert index.unreadable == {}
