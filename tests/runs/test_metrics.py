"""A log of JSON lines: whole lines only, NaN kept, no step twice, and no disk that stops the training."""

from __future__ import annotations

import json
import math
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covey.runs.metrics import JsonLines, read
from example_counts import examples


def test_lines_come_back_in_order(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "metrics.jsonl")
    rows = [{"step": step, "loss": step / 3, "note": "größer\n", "list": [1, None], "flag": True} for step in (1, 2, 3)]
    for row in rows:
        log.append(row)
        assert read(log.path)[-1] == row  # on the disk at once
    assert read(log.path) == rows


def test_a_missing_file_is_an_empty_log(tmp_path: Path) -> None:
    assert read(tmp_path / "metrics.jsonl") == []


def test_nan_is_null_for_other_readers_and_nan_for_ours(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "metrics.jsonl")
    log.append(
        {"step": 1, "loss": math.nan, "kl": math.inf, "low": -math.inf, "none": None, "by": {"length": math.nan}}
    )
    (line,) = log.path.read_text().splitlines()
    strict = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert strict["loss"] is strict["kl"] is None
    assert strict["non_finite"] == {"loss": "nan", "kl": "inf", "low": "-inf", "by.length": "nan"}
    (row,) = read(log.path)
    assert math.isnan(row["loss"])
    assert row["kl"] == math.inf
    assert row["low"] == -math.inf
    assert row["none"] is None
    assert "non_finite" not in row


def test_tensors_and_numpy_numbers_are_numbers(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "metrics.jsonl")
    log.append({"step": np.int64(3), "loss": torch.tensor(0.5), "kl": np.float32("nan")})
    assert json.loads(log.path.read_text())["loss"] == 0.5
    assert read(log.path)[0]["step"] == 3


def test_what_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "metrics.jsonl")
    with pytest.raises(TypeError, match=r"by\.model is a object"):
        log.append({"by": {"model": object()}})
    log.append({"step": 1})
    assert read(log.path) == [{"step": 1}]


@pytest.mark.parametrize("cut", range(1, 30, 4))
def test_a_torn_last_line_is_left_out_and_does_not_spoil_the_next(cut: int, tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "metrics.jsonl")
    log.append({"step": 1, "loss": 0.25})
    whole = log.path.stat().st_size
    log.append({"step": 2, "loss": 0.123456789})
    os.truncate(log.path, whole + cut)
    assert read(log.path) == [{"step": 1, "loss": 0.25}]
    JsonLines(log.path).append({"step": 2, "loss": 0.5})
    assert read(log.path) == [{"step": 1, "loss": 0.25}, {"step": 2, "loss": 0.5}]


def test_no_step_is_logged_twice_after_resuming(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "metrics.jsonl")
    for step in (1, 2, 2, 3, 4):
        log.append({"step": step})
    log.append({"note": "a line without a step stays"})
    assert log.truncate_to(2) == 2
    log.append({"step": 3})
    assert [row.get("step") for row in read(log.path)] == [1, 2, 2, None, 3]
    assert log.truncate_to(10) == 0
    assert JsonLines(tmp_path / "other.jsonl").truncate_to(1) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@examples(30)
@given(
    content=st.binary()
    | st.text().map(str.encode)
    | st.lists(st.sampled_from([b'{"a":1}', b"\n", b"[", b'{"non_finite":{"a":[]}}'])).map(b"".join)
)
def test_any_bytes_can_be_read(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    assert all(isinstance(row, dict) for row in read(path))
    JsonLines(path).truncate_to(0)


def test_a_row_may_be_longer_than_a_pipe(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "metrics.jsonl")
    log.append({"step": 1, "text": "x" * 3_000_000})
    assert len(read(log.path)[0]["text"]) == 3_000_000


@pytest.fixture
def refused(tmp_path: Path) -> JsonLines:
    """A log with step 1 on the disk and steps 2 and 3 waiting, since the file has a second name."""
    log = JsonLines(tmp_path / "metrics.jsonl")
    log.append({"step": 1})
    os.link(log.path, tmp_path / "second")
    with pytest.warns(UserWarning, match="lines wait in memory"):
        log.append({"step": 2})
    log.append({"step": 3})
    return log


def test_lines_that_wait_are_written_before_a_checkpoint_and_at_the_end(refused: JsonLines) -> None:
    (refused.path.parent / "second").unlink()
    with pytest.warns(UserWarning, match="no line was lost"):
        refused.sync()
    assert [row["step"] for row in read(refused.path)] == [1, 2, 3]


def test_lines_that_were_never_written_are_counted_at_the_end(refused: JsonLines) -> None:
    with pytest.warns(UserWarning, match="2 lines of .*metrics.jsonl are lost"):
        refused.close()
    with warnings.catch_warnings(action="error"):
        refused.close()


def test_lines_that_wait_are_dropped_too_where_a_run_goes_back(refused: JsonLines) -> None:
    refused.truncate_to(2)
    (refused.path.parent / "second").unlink()
    with pytest.warns(UserWarning, match="can be written again"):
        refused.append({"step": 3, "again": True})
    assert read(refused.path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


def test_lines_beyond_the_limit_are_not_called_kept(refused: JsonLines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.runs.metrics._MAX_WAITING", 2)
    refused.append({"step": 4})
    (refused.path.parent / "second").unlink()
    with pytest.warns(UserWarning, match="the oldest 1 of those that waited are lost"):
        refused.append({"step": 5})
    assert [row["step"] for row in read(refused.path)] == [1, 3, 4, 5]


def test_rows_of_a_long_log_share_the_texts_of_their_names(tmp_path):
    log = JsonLines(tmp_path / "metrics.jsonl")
    for step in range(3):
        log.append({"step": step, "reward/some name": 0.5})
    names = [name for row in read(tmp_path / "metrics.jsonl") for name in row]
    assert len(set(map(id, names))) == 2
