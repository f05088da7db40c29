"""`covey data check` and `covey data clean` as one types them."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from covey.cli import main


@pytest.fixture(autouse=True)
def _process_as_it_was(monkeypatch):
    logger = logging.getLogger("covey")
    before = logger.handlers[:], logger.level, logger.propagate
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture
def dirty(tmp_path):
    rows = [{"prompt": f"What is {a} and {b}?", "answer": str(a + b)} for a in range(5) for b in range(10, 16)]
    rows[4] = rows[1]
    rows[7] = {**rows[7], "prompt": rows[7]["prompt"] + " Write to ann@example.org\x1b[31m."}
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_check_shows_counts_examples_and_the_fix_and_fails(dirty, capsys):
    assert main(["data", "check", str(dirty)]) == 1
    said = capsys.readouterr().out
    assert "30 rows" in said
    assert "row 4 has the prompt of row 1" in said
    assert "fix: clean keeps the first" in said
    assert said.index("duplicates") < said.index("to look at") < said.index("e-mail addresses")
    assert "\x1b" not in said
    assert "would leave out 1 row and mend 1" in said


def test_check_as_json_names_every_row(dirty, capsys):
    assert main(["data", "check", str(dirty), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    rows = {one["kind"]: one["rows"] for one in found["findings"]}
    assert rows == {"duplicate": [4], "controls": [7], "email": [7]}
    assert (found["ok"], found["would_drop"], found["would_change"]) == (False, 1, 1)


def test_check_passes_where_there_is_only_something_to_look_at(dirty, capsys):
    assert main(["data", "check", str(dirty), "--ignore", "duplicate", "controls"]) == 0
    assert "e-mail addresses" in capsys.readouterr().out


def test_files_that_a_pattern_names_are_one_set_and_a_line_that_cannot_be_read_says_why(tmp_path, capsys):
    (tmp_path / "part-1.jsonl").write_text('{"prompt": "What is it?"}\n')
    (tmp_path / "part-2.jsonl").write_text('{"prompt": "Who is it?"}\n{"prompt":\n')
    assert main(["data", "check", str(tmp_path / "part-*.jsonl")]) == 1
    assert "row 2 is not JSON (Expecting value" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, content, why",
    [
        ("a.csv", b"prompt,answer\na,1\nb,2,3\n", "line 3 has 3 cells, and the header 2"),
        ("a.csv", b"prompt\ncaf\xe9\n", "is not UTF-8"),
        ("a.json", b'[{"prompt": "a"', "is not JSON"),
    ],
)
def test_a_file_that_breaks_while_it_is_read_is_named_in_a_sentence(tmp_path, capsys, name, content, why):
    (tmp_path / name).write_bytes(content)
    assert main(["data", "check", str(tmp_path / name)]) == 2
    (said,) = capsys.readouterr().err.splitlines()  # nothing of a reader's own log beside it
    assert name in said
    assert why in said


def test_clean_writes_a_file_that_check_passes_and_refuses_to_write_it_twice(dirty, tmp_path, capsys):
    before = dirty.read_bytes()
    words = ["data", "clean", str(dirty), "--output", str(tmp_path / "clean.jsonl")]
    assert main(words) == 0
    assert "29 of 30 rows, 1 of them mended" in capsys.readouterr().out
    assert dirty.read_bytes() == before
    assert len((tmp_path / "clean.report.jsonl").read_text().splitlines()) == 2
    assert main(["data", "check", str(tmp_path / "clean.jsonl")]) == 0
    assert main(words) == 2
    assert "nothing is overwritten" in capsys.readouterr().err


def test_prompts_over_the_limit_of_a_real_tokenizer_are_counted_in_tokens(dirty, capsys):
    assert main(["data", "check", str(dirty), "--tokenizer", "demo", "--max-prompt-length", "20", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (too_long,) = [one for one in found["findings"] if one["kind"] == "too_long"]
    assert too_long["rows"] == [7]
    assert "tokens to the limit" in too_long["examples"][0]["why"]
    assert found["lengths"]["tokens"]["most"] > 20


def test_the_page_shows_findings_and_runs_nothing_that_rows_say(dirty, tmp_path, capsys):
    with dirty.open("a") as file:
        file.write(json.dumps({"prompt": "<script>alert(1)</script> & co\x00", "answer": "3"}) + "\n")
    page = tmp_path / "found.html"
    assert main(["data", "check", str(dirty), "--html", str(page), "--examples", "0"]) == 1
    assert "row 4 has the prompt" not in capsys.readouterr().out
    text = page.read_text()
    assert "would leave out 1 of 31 rows and mend 2" in text
    assert "has the prompt of row 1" in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; co" in text
    assert "<script" not in text
    assert "default-src 'none'" in text


@pytest.mark.parametrize(
    "words, said",
    [
        (["data", "chek", "a.jsonl"], "Did you mean check?"),
        (["data", "check"], "covey data check needs a data set"),
        (["data", "clean", "a.jsonl"], "needs --output"),
        (["data", "check", "nowhere.jsonl"], "does not exist"),
        (["data", "check", "demo", "--tokenizer", "demo"], "need each other"),
        (["data", "check", "demo", "--near", "3"], "near is 3.0"),
        (["data", "check", "demo", "--html", "a.jsonl"], "ends in .html"),
        (["data", "clean", "demo", "--output", "a.csv"], "should end in .jsonl"),
        (["data", "clean", "demo", "--output", "no/such/a.jsonl"], "make it first"),
    ],
)
def test_wrong_words_are_answered_in_a_sentence(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_help_shows_both_verbs_and_their_options(capsys):
    assert main(["data", "--help"]) == 0
    assert main(["data", "check", "--help"]) == 0
    said = capsys.readouterr().out
    assert "covey data clean DATASET -o FILE" in said
    assert "--against" in said
