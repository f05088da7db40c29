"""Values of JSON and CSV files: a text stays that text, a number that number, in every column and format."""

from __future__ import annotations

import gzip
import json
import math

import datasets
import pytest

from covey.data import PromptStream, load, tables
from covey.errors import DataError
from kit import tiny_tokenizer

MIXED = ["007", 8, "1.50", True, "null", "[1, 2]", None, 0.1, "2020-01-31", [1, "a"], {"a": "1"}, 2**70, "", "NA"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def written(path, answers):
    rows = [{"prompt": f"q{number}", "answer": answer} for number, answer in enumerate(answers)]
    text = (
        json.dumps(rows)
        if path.name.startswith("a.json") and "jsonl" not in path.name
        else "\n".join(map(json.dumps, rows))
    )
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def same(values, others):
    return [(type(one), one) for one in values] == [(type(one), one) for one in others]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson", "a.jsonl.gz", "a.json.gz"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_json_column_of_many_types_holds_what_the_file_holds(tmp_path, name, streaming):
    path = written(tmp_path / name, MIXED)
    assert same([row["answer"] for row in load(path, streaming=streaming)], MIXED)
    if not streaming:
        assert same(load(path, split="train[2:5]")["answer"], MIXED[2:5])
        assert same([row["answer"] for row in load(path)], MIXED), "from the cache too"


@pytest.mark.parametrize(
    "answers",
    [
        ["2020-01-31", "2021-02-28"],
        ["2020-01-31T10:00", "2021-02-28"],
        ["1", "2"],
        [1, 2.0],
        [0.1234567890123456, 1.1],
        [True, None],
        [{"a": 1}, {"b": "2"}],
        [["1"], [2]],
        [{"text": "007", "more": ["1"]}, {"text": "8", "more": []}],
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_json_column_of_one_type_holds_what_the_file_holds(tmp_path, answers, name):
    assert same(load(written(tmp_path / name, answers))["answer"], answers)


def test_messages_of_different_fields_keep_their_texts(tmp_path):
    prompts = [[{"role": "user", "content": "8"}], [{"role": "user", "content": "007", "name": "Ann"}]]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    assert load(path)["prompt"][:] == prompts


@pytest.mark.parametrize("streaming", [False, True])
def test_csv_cells_are_numbers_where_the_text_is_exactly_that_number(tmp_path, streaming):
    columns = {
        "prompt": (["a", "b", "c"], ["a", "b", "c"]),
        "words": (["NA", "None", "null"], ["NA", "None", "null"]),
        "padded": (["007", "8", "9"], ["007", "8", "9"]),
        "cents": (["1.50", "2", "3"], ["1.50", "2", "3"]),
        "truth": (["True", "false", "yes"], ["True", "false", "yes"]),
        "days": (["2020-01-31", "2020-02-01", "x"], ["2020-01-31", "2020-02-01", "x"]),
        "counts": (["1", "-2", "30"], [1, -2, 30]),
        "gaps": (["1", "", "3"], [1, None, 3]),
        "shares": (["0.5", "1", "2.25"], [0.5, 1, 2.25]),
        "large": (["1", str(2**70), "3"], ["1", str(2**70), "3"]),
        "nan": (["nan", "inf", "1e5"], ["nan", "inf", "1e5"]),
        "signed": (["+1", "2", "-0"], ["+1", "2", "-0"]),
    }
    lines = [",".join(columns), *(",".join(row) for row in zip(*(texts for texts, _ in columns.values()), strict=True))]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    loaded = list(load(tmp_path / "a.csv", streaming=streaming))
    for name, (_, expected) in columns.items():
        assert same([row[name] for row in loaded], expected), name


def test_csv_is_read_by_its_header_with_or_without_a_mark_of_its_encoding(tmp_path):
    rows = [{"prompt": "What is 1; plus 1?", "answer": 2}, {"prompt": "a\nb", "answer": 3}]
    for name, delimiter in (("a.csv", ";"), ("b.csv", "\t"), ("c.tsv", "\t"), ("d.csv", ",")):
        text = f"prompt{delimiter}answer\n" + "".join(f'"{row["prompt"]}"{delimiter}{row["answer"]}\n' for row in rows)
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert load(tmp_path / name)[:] == {"prompt": [row["prompt"] for row in rows], "answer": [2, 3]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompt,answer\na,1,2\n", "line 2 has 3 cells, and the header 2"),
        ("prompt,prompt\na,1\n", "names a column twice"),
        ('prompt,answer\n"a,1\n', "cannot be read as CSV"),
        ("prompt,answer\n", "has no rows"),
    ],
)
def test_csv_that_is_no_table_is_refused(tmp_path, text, said):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=said):
        load(tmp_path / "a.csv")


def test_a_stream_of_mixed_values_resumes_exactly(tmp_path):
    def stream():
        return PromptStream(load(written(tmp_path / "a.jsonl", MIXED), streaming=True), tiny_tokenizer(), seed=1)

    whole = [prompt.columns["answer"] for prompt in stream().take(20)]
    first = stream()
    first.take(9)
    second = stream()
    second.load_state_dict(first.state_dict())
    assert same([prompt.columns["answer"] for prompt in second.take(11)], whole[9:])


@pytest.mark.parametrize(
    ("content", "count"),
    [
        ([{"prompt": "a"}, {"prompt": "b"}], 2),
        ({"data": [{"prompt": "a"}, {"prompt": "b"}], "version": "1.1"}, 2),
        ({"prompt": ["a", "b"], "answer": ["1", "2"]}, 2),
        ({"prompt": {"0": "a", "1": "b"}, "answer": {"0": 1, "1": 2}}, 2),
        ({"prompt": "a", "answer": "1"}, 1),
        ({"prompt": [{"role": "user", "content": "a"}], "answer": ["1"]}, 1),
    ],
)
def test_a_json_file_is_a_list_a_list_in_an_object_columns_or_one_row(tmp_path, content, count):
    (tmp_path / "a.json").write_text(json.dumps(content, indent=1))
    loaded = load(tmp_path / "a.json")
    assert len(loaded) == count
    assert loaded[0]["prompt"] in ("a", [{"role": "user", "content": "a"}])


def test_a_json_file_of_lines_is_read_as_lines(tmp_path):
    written(tmp_path / "b.json", ["1", "2"])
    assert load(tmp_path / "b.json")["answer"][:] == ["1", "2"]
    (tmp_path / "b.json").write_text('{"train": [{"prompt": "a"}], "test": [{"prompt": "b"}]}')
    with pytest.raises(DataError, match=r"several lists of rows \(train, test\)"):
        load(tmp_path / "b.json")
    (tmp_path / "b.json").write_text('[{"prompt": "a"},\n oops]')
    with pytest.raises(DataError, match="is not JSON .*line 2"):
        load(tmp_path / "b.json")


def test_not_a_number_stays_one(tmp_path):
    (tmp_path / "a.json").write_text('[{"prompt": "a", "x": NaN}, {"prompt": "b", "x": "y"}]')
    assert math.isnan(load(tmp_path / "a.json")[0]["x"])


def test_a_set_of_objects_without_nulls_mixes_with_one_of_nulls_that_were_written(tmp_path):
    def called(arguments):
        return [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]  # fmt: skip

    structs = [
        {"prompt": called({"x": "1"}), "info": {"a": "b"}},
        {"prompt": called({"y": "2"}), "info": {"a": None}},
        {"prompt": called({"x": "3"}), "info": None},
    ]
    nulls = [{"prompt": called({"x": None}), "info": {"a": None}}]
    datasets.Dataset.from_list(structs).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, nulls)))
    (tmp_path / "c.jsonl").write_text(json.dumps({"prompt": called({"x": "4"}), "info": {"a": "c"}}))
    names = [str(tmp_path / name) for name in ("a.parquet", "b.jsonl", "c.jsonl")]
    rows = load(" + ".join(f"1*{name}" for name in names))
    expected = [*structs, *nulls, {"prompt": called({"x": "4"}), "info": {"a": "c"}}]
    assert [{"prompt": row["prompt"], "info": row["info"]} for row in rows] == expected
    assert rows["dataset"][:] == [names[0]] * 3 + names[1:]


@pytest.mark.parametrize("value", [1, "s"])
def test_a_column_that_comes_after_the_first_rows_of_a_stream_is_not_lost(tmp_path, monkeypatch, value):
    """Whether or not the columns before it are of several types."""
    monkeypatch.setattr(tables, "_SCANNED", 200)
    rows = [{"prompt": f"q{number}", "v": number if number % 2 else value} for number in range(30)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "late", "v": 1, "answer": "42"}]))
    assert load(path)[30]["answer"] == "42"
    with pytest.raises(DataError, match="column 'answer' is not in the first rows"):
        list(load(path, streaming=True))


def test_a_column_that_comes_late_in_the_rows_that_are_scanned_is_read(tmp_path):
    """`datasets` infers the columns of a stream from its first 10 MiB."""
    path = tmp_path / "a.jsonl"
    line = json.dumps({"prompt": "q" * 1000}) + "\n"
    path.write_text(line * 12_000 + json.dumps({"prompt": "late", "answer": "42"}) + "\n")
    assert [row["answer"] for row in load(path, streaming=True)][-2:] == [None, "42"]
