"""What a search has found once (`coverage_guided.py`), so that it is not found again."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from covey.errors import CheckpointError
from covey.rewards.builtin import chat_endpoint
from covey.runs import checkpoint, checksums


def sealed(folder: Path, change: Any) -> Path:
    """A checkpoint whose manifest was changed, with its own checksum set right."""
    checkpoint.save(folder, 2, lambda target: (target / "config.json").write_text("{}"), {"step": 2}, keep=None)
    path = folder / "checkpoint-2" / checksums.NAME
    found = json.loads(path.read_text()) | {"xxh3_128_of_this_file": checksums._UNSET}
    change(found)
    content = json.dumps(found).encode()
    path.write_bytes(content.replace(checksums._UNSET.encode(), checksums._digest(content).encode()))
    return path.parent


@pytest.mark.parametrize("step", ["none", None, 2.0, True, "2"])
def test_a_manifest_whose_step_is_no_number_is_damaged(step: Any, tmp_path: Path) -> None:
    folder = sealed(tmp_path, lambda found: found.pop("step") if step == "none" else found.update(step=step))
    assert checksums.problems(folder) == ["manifest.json is damaged (its step is no number)"]
    with pytest.raises(CheckpointError), pytest.warns(UserWarning, match="its step is no number"):
        checkpoint.latest(tmp_path)


def test_a_manifest_that_names_a_file_no_system_can_name_is_damaged(tmp_path: Path) -> None:
    entry = {"size": 1, "xxh3_128": "0"}
    folder = sealed(tmp_path, lambda found: found["files"].update({"\ud800": entry}))
    assert len(checksums.problems(folder)) == 1


@pytest.mark.parametrize(
    ("value", "seconds"), [("²", 0.0), ("1.5", 1.5), ("3", 3.0), (".", 0.0), ("1e9", 0.0), ("9" * 400, 30.0)]
)
def test_a_server_says_when_to_come_back_in_plain_digits_or_is_not_heard(value: str, seconds: float) -> None:
    assert chat_endpoint._retry_after({"Retry-After": value}) == seconds


def test_a_reply_that_counts_infinitely_many_tokens_is_no_reply() -> None:
    body = b'{"choices": [{"message": {"content": "8"}}], "usage": {"prompt_tokens": Infinity}}'
    with pytest.raises(chat_endpoint._PassingError, match="no chat completion"):
        chat_endpoint._reply_of(body)


def test_a_length_that_is_no_plain_number_is_not_compared() -> None:
    response = io.BytesIO(b"whole")
    response.headers = {"Content-Length": "²"}  # type: ignore[attr-defined]
    assert chat_endpoint._read(response, until=float("inf")) == b"whole"
