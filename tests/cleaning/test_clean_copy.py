"""The clean copy holds what may stay, in its order and bytes; the report says the rest, row by row."""

from __future__ import annotations

import gzip
import json
import random
import resource
import tempfile
import time
from pathlib import Path

import pytest

from covey.data import load
from covey.doctor.data_check import Rows, Settings, clean, inspect
from covey.errors import ConfigError, DataError, StorageError
from forked import Forked

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k"
GOOD = [
    b'{"prompt":  "Two plus two?", "answer": "4",   "more": [1.50, null]}',
    '{"prompt": "Drei \u00c4pfel?", "answer": "3"}'.encode(),
    b'{"answer": "5", "prompt": "\\u0054wo plus three?"}',
]


def written(path, lines):
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def cleaned(source, output, **settings):
    done = clean(inspect(Rows(str(source)), Settings(**settings)), output)
    report = [json.loads(line) for line in done.report.read_text().splitlines()]
    return done, output.read_bytes().splitlines(), report


def test_rows_without_a_fault_keep_their_bytes_and_their_order(tmp_path):
    done, lines, report = cleaned(written(tmp_path / "a.jsonl", [GOOD[0], b"", *GOOD[1:]]), tmp_path / "b.jsonl")
    assert (lines, report) == (GOOD, [])
    assert (done.num_rows, done.kept, done.changed, done.dropped) == (3, 3, 0, {})


def test_every_row_that_is_dropped_or_changed_has_a_line_that_says_why(tmp_path):
    lines = [
        GOOD[0],
        b'{"prompt": "Two plus  two?", "answer": "4.0"}',
        b'{"prompt": "The caf\xc3\x83\xc2\xa9 has 3 tables?", "answer": "3", "note": "fine"}',
        b"{broken",
        b'{"prompt": "", "answer": null}',
        GOOD[1],
    ]
    done, kept, report = cleaned(written(tmp_path / "a.jsonl", lines), tmp_path / "b.jsonl")
    mended = '{"prompt": "The café has 3 tables?", "answer": "3", "note": "fine"}'.encode()
    assert kept == [GOOD[0], mended, GOOD[1]]
    assert [(one["row"], one["did"]) for one in report] == [
        (1, "dropped"),
        (2, "changed"),
        (3, "dropped"),
        (4, "dropped"),
    ]
    assert report[0]["why"] == ["has the prompt of row 0"]
    assert report[1]["new_row"] == 1
    assert report[1]["columns"] == [
        {"column": "prompt", "before": "The cafÃ© has 3 tables?", "after": "The café has 3 tables?"}
    ]
    assert report[2]["why"][0].startswith("is not JSON")
    assert report[3]["kinds"] == ["no_prompt"]
    assert done.dropped == {"duplicate": 1, "unreadable": 1, "no_prompt": 1}  # fmt: skip


def test_nothing_is_ever_overwritten(tmp_path):
    source = written(tmp_path / "a.jsonl", GOOD)
    for name in ("b.jsonl", "b.report.jsonl"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(ConfigError, match="there already"):
            cleaned(source, tmp_path / "b.jsonl")
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match="there already"):
        cleaned(source, source)


def test_a_source_that_changed_in_between_leaves_no_file_behind(tmp_path):
    source = written(tmp_path / "a.jsonl", GOOD)
    inspection = inspect(Rows(str(source)), Settings())
    written(source, GOOD[:2])
    with pytest.raises(DataError, match="had 3 rows and now has 2"):
        clean(inspection, tmp_path / "b.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_disk_that_refuses_is_named_and_no_file_is_left_behind(tmp_path):
    lines = [b'{"prompt": "Is %d even?", "answer": "%d"}' % (number, number % 2) for number in range(100)]
    inspection = inspect(Rows(str(written(tmp_path / "a.jsonl", lines))), Settings())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(StorageError, match="cannot be written: File too large"):
            clean(inspection, tmp_path / "b.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_temporary_folder_that_is_full_is_named(tmp_path, monkeypatch):
    source = written(tmp_path / "a.jsonl", [b'{"prompt": "Is %d even, or odd?"}' % number for number in range(3000)])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(StorageError, match="point TMPDIR"):
            inspect(Rows(str(source)), Settings())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.slow
def test_a_clean_that_is_killed_leaves_no_file_with_the_name_of_a_whole_one(tmp_path):
    lines = [b'{"prompt": "Is %d even, or is it odd?"}' % number for number in range(20_000)]
    source, output = written(tmp_path / "a.jsonl", lines), tmp_path / "b.jsonl"
    code = "from covey.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
    words = ["data", "clean", str(source), "--output", str(output), "--near", "0"]
    with Forked("-c", code, *words) as child:
        until = time.monotonic() + 200
        while not list(tmp_path.glob(".b.jsonl.*.partial")) and child.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
    if output.exists():  # it was quicker than the signal
        assert (tmp_path / "b.report.jsonl").exists()
        assert output.read_bytes() == source.read_bytes()


def test_other_formats_become_json_lines(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(b"\n".join([*GOOD, GOOD[0]]))
    assert cleaned(tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl")[1] == GOOD
    (tmp_path / "c.csv").write_text('prompt,answer\n"What is 1 + 1, now?",2\n"What is 1 + 1, now?",2\n')
    assert [json.loads(line) for line in cleaned(tmp_path / "c.csv", tmp_path / "d.jsonl")[1]] == [
        {"prompt": "What is 1 + 1, now?", "answer": 2}
    ]


def test_a_broken_archive_is_named(tmp_path):
    whole = gzip.compress(b"\n".join(GOOD * 50))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot be read to its end"):
        inspect(Rows(str(tmp_path / "a.jsonl.gz")), Settings())


def test_a_fault_that_is_ignored_is_left_in_the_rows(tmp_path):
    line = b'{"prompt": "a\\u0000b Cafe\\u0301", "answer": "1"}'
    _, lines, _ = cleaned(written(tmp_path / "a.jsonl", [line]), tmp_path / "b.jsonl", ignore=("form",))
    assert json.loads(lines[0])["prompt"] == "ab Cafe\u0301"


def dirty(rows, seed):
    """Rows with faults of many kinds, at known places."""
    random.seed(seed)
    rows = [dict(row) for row in rows]
    for place in random.sample(range(len(rows)), len(rows) // 4):
        row = rows[place]
        match place % 6:
            case 0:
                rows[place] = dict(random.choice(rows))
            case 1:
                row["question"] = row["question"].replace("a ", "a\u200b ", 1)
            case 2:
                row["question"] = (row["question"] + " Zoë").encode().decode("cp1252", "replace")
            case 3:
                row["answer"] = None
            case 4:
                row["question"] = " " * (place % 3)
            case 5:
                row["question"] = random.choice(rows)["question"].upper()
    return rows


@pytest.mark.slow
def test_cleaning_is_deterministic_and_what_it_wrote_is_clean_and_loads(tmp_path):
    rows = [json.loads(line) for line in (GSM8K / "train.jsonl").read_text().splitlines()]
    source = written(tmp_path / "a.jsonl", [json.dumps(row).encode() for row in dirty(rows, 1)])
    settings = {"prompt_column": "question", "against": (str(GSM8K / "test.jsonl"),)}
    first, lines, report = cleaned(source, tmp_path / "b.jsonl", **settings)
    _, again, same_report = cleaned(source, tmp_path / "c.jsonl", **settings)
    assert (lines, report) == (again, same_report)
    assert first.kept == len(lines) == len(load(tmp_path / "b.jsonl", prompt_column="question"))
    assert first.kept + sum(first.dropped.values()) == 2500
    assert len(report) == first.changed + sum(first.dropped.values())
    second, untouched, nothing = cleaned(tmp_path / "b.jsonl", tmp_path / "d.jsonl", **settings)
    assert (untouched, nothing, second.dropped, second.changed) == (lines, [], {}, 0)
