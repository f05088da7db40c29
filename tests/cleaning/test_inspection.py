"""A data set is read once, and every planted fault is found in its row and no other."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from covey.doctor.data_check.inspection import inspect
from covey.doctor.data_check.rows import Rows
from covey.doctor.data_check.settings import Settings
from covey.errors import ConfigError, DataError

DATA = Path(__file__).parents[1] / "data"
THINGS = "apples pears plums figs nuts dates limes kiwis beans leeks peas yams buns pies tarts cakes rolls books pens maps cups"


def rows_of_sums(count, seed=0):
    random.seed(seed)
    found = []
    for index in range(count):
        first, second = random.sample(THINGS.split(), 2)
        a, b = index + 2, random.randint(2, 90)
        found.append(
            {
                "prompt": f"Ann has {a} {first} and she buys {b} {second} at the shop. How many are they?",
                "answer": str(a + b),
            }
        )
    return found  # fmt: skip


def written(path, rows):
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def found(path, rows, **settings):
    findings = inspect(Rows(written(path, rows)), Settings(**settings)).findings
    return {kind.name: findings.rows(kind.name) for kind in findings.kinds()}


class WordTokenizer:
    """One id a word, and a template that refuses a second system message."""

    chat_template = "words"

    def __call__(self, text):
        return {"input_ids": text.split()}

    def apply_chat_template(self, messages, **how):
        if sum(message["role"] == "system" for message in messages) > 1:
            raise ValueError("one system message")
        return {"input_ids": " ".join(message["content"] for message in messages).split()}


def test_a_clean_set_has_no_findings(tmp_path):
    assert found(tmp_path / "a.jsonl", rows_of_sums(60)) == {}


def test_every_planted_fault_is_found_in_its_row_and_no_other(tmp_path):
    rows = rows_of_sums(60)
    rows[3] = {"prompt": "  ", "answer": "1"}
    rows[4] = {"prompt": None, "answer": "1"}
    rows[5] = {"prompt": [{"content": "no role"}], "answer": "1"}
    rows[7] = {**rows[7], "answer": None}
    rows[8] = {**rows[8], "answer": " "}
    rows[9] = {**rows[9], "answer": "about a dozen"}
    rows[11] = dict(rows[10])
    rows[13] = {**rows[12], "answer": "-5"}
    rows[15] = {**rows[15], "prompt": rows[15]["prompt"] + " In the cafÃ©."}
    rows[16] = {**rows[16], "prompt": rows[16]["prompt"] + "\x00"}
    rows[17] = {**rows[17], "prompt": rows[17]["prompt"] + "\ud800"}
    rows[18] = {**rows[18], "prompt": rows[18]["prompt"] + " Cafe\u0301"}
    rows[20] = {**rows[20], "prompt": rows[20]["prompt"] + " Ask ann@example.org."}
    rows[21] = {**rows[21], "prompt": "Wie viele Äpfel hat er, wenn sie 3 kauft und die Frau 4 von ihnen isst?"}
    rows[22] = {**rows[22], "prompt": "So how many of the apples does she have? " * 45}
    rows[23] = {**rows[23], "prompt": "|---|---|" * 8}
    rows[30] = b'{"prompt": "cut off'
    rows[31] = b'{"prompt": "caf\xe9"}'
    rows[32] = b"[1, 2]"
    assert found(tmp_path / "a.jsonl", rows) == {
        "unreadable": [30, 31, 32],
        "no_prompt": [3, 4, 5],
        "duplicate": [11],
        "disputed": [12, 13],
        "no_answer": [7, 8],
        "odd_answer": [9],
        "mojibake": [15],
        "controls": [16],
        "surrogates": [17],
        "form": [18],
        "lost": [17],
        "email": [20],
        "language": [21],
        "length": [22],
        "symbols": [23],
    }


@pytest.mark.slow
def test_tokens_beyond_the_limit_are_counted_and_a_template_that_refuses_is_named(tmp_path):
    rows = rows_of_sums(3)
    rows[1]["prompt"] = "word " * 30 + "end"
    rows[2]["prompt"] = [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}]
    settings = Settings(tokenizer=WordTokenizer(), max_prompt_length=20)
    findings = inspect(Rows(written(tmp_path / "a.jsonl", rows)), settings).findings
    assert list(findings.of("too_long")) == [(1, -1, 11.0)]
    assert findings.rows("template") == [2]


def test_chat_prompts_are_held_against_an_evaluation_set_and_its_row_is_named(tmp_path):
    questions, rows = rows_of_sums(20, seed=1), rows_of_sums(20, seed=2)
    eval_file = written(tmp_path / "eval.jsonl", questions)
    rows[6]["prompt"] = [{"role": "user", "content": "Please: " + questions[12]["prompt"]}]
    inspection = inspect(Rows(written(tmp_path / "a.jsonl", rows)), Settings(against=(eval_file,), overlap=0.9))
    ((row, other, amount),) = inspection.findings.of("contaminated")
    (kind,) = inspection.findings.kinds()
    assert (row, other) == (6, 12)
    assert inspection.reason(kind, other, amount) == f"shares {amount:.2f} of its words with row 12 of {eval_file}"


def test_an_evaluation_set_may_name_its_prompts_otherwise_and_one_without_text_is_refused(tmp_path):
    rows = rows_of_sums(20)
    eval_file = written(tmp_path / "eval.jsonl", [{"task": row["prompt"]} for row in rows_of_sums(4)])
    settings = {"against": (eval_file,), "overlap": 0.9}
    assert found(tmp_path / "a.jsonl", rows, **settings, against_column="task") == {"contaminated": [0, 1, 2, 3]}
    with pytest.raises(DataError, match="has no text in its column 'prompt'"):
        found(tmp_path / "a.jsonl", rows, **settings)


@pytest.mark.nightly
def test_an_answer_that_math_verify_cannot_parse_is_found_where_maths_is_asked_for(tmp_path):
    pytest.importorskip("math_verify")
    rows = rows_of_sums(4)
    rows[1]["answer"] = r"\frac{1}{2} + \sqrt{3}"
    rows[2]["answer"] = r"\frac{ ??"
    assert found(tmp_path / "a.jsonl", rows, answers="math") == {"odd_answer": [2]}


def test_kinds_may_be_ignored(tmp_path):
    rows = rows_of_sums(30)
    rows[1] = rows[0]
    assert found(tmp_path / "a.jsonl", rows, ignore=("duplicate",)) == {}


def test_answers_that_are_objects_are_compared(tmp_path):
    rows = rows_of_sums(4)
    for row, answer in zip(rows, ({"sky": "clear"}, {"storm": "soon"}, {"sky": "clear"}, "calm"), strict=True):
        row["prompt"] = [{"role": "user", "content": "Warm?"}, {"role": "tool", "content": answer}]
        row["answer"] = "yes"
    assert found(tmp_path / "a.jsonl", rows) == {"duplicate": [2]}


def test_the_same_findings_whatever_the_format(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = rows_of_sums(30)
    rows[5] = rows[2]
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    assert inspect(Rows(str(path)), Settings()).findings.rows("duplicate") == [5]


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"prompt_column": "promt"}, "Did you mean prompt?"),
        ({"answer_column": "gold"}, "has no column 'gold'; it has prompt, answer."),
    ],
)
def test_a_column_that_is_not_there_is_named(tmp_path, settings, said):
    with pytest.raises(DataError, match=said.replace("?", r"\?")):
        found(tmp_path / "a.jsonl", rows_of_sums(3), **settings)


def test_settings_that_mean_nothing_are_refused(tmp_path):
    for wrong in ({"near": -0.1}, {"overlap": 2}, {"gram": 1}, {"ignore": ("duplicates",)}, {"max_prompt_length": 5}):
        with pytest.raises(ConfigError):
            Settings(**wrong)
    path = written(tmp_path / "a.jsonl", rows_of_sums(3))
    with pytest.raises(ConfigError, match="against itself"):
        inspect(Rows(path), Settings(against=(path,)))


@pytest.mark.nightly
def test_gsm8k_is_nearly_clean():
    train, test = (str(DATA / "gsm8k" / f"{name}.jsonl") for name in ("train", "test"))
    findings = inspect(Rows(train), Settings(prompt_column="question", against=(test,))).findings
    # two questions on trains stand in both sets, with other numbers
    assert {kind.name: findings.count(kind.name) for kind in findings.kinds()} == {"akin": 2}
