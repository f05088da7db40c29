"""Data sets by name, and what is said about the ones that cannot be used."""

from __future__ import annotations

import json
import tracemalloc

import datasets
import fsspec
import pytest

from covey.data import check_dataset, load
from covey.data.loading import _with_system
from covey.errors import DataError

ROWS = [
    {"prompt": "1 + 1 =", "answer": "2"},
    {"prompt": "2 + 2 =", "answer": "4"},
    {"prompt": "3 + 3 =", "answer": "6"},
]
CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def jsonl(path, rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def test_a_cache_that_cannot_be_written_is_named_not_the_file(tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "taken" / "cache"))
    said = (
        r"a.jsonl cannot be taken into the cache of data sets, .*taken/cache \(Not a directory.*set HF_DATASETS_CACHE"
    )
    with pytest.raises(DataError, match=said):
        load(jsonl(tmp_path / "a.jsonl", ROWS))


# -- what can be named ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz"])
def test_a_file_is_read_by_its_suffix(tmp_path, name):
    path, table = tmp_path / name, datasets.Dataset.from_list(ROWS)
    if name == "a.json":
        path.write_text(json.dumps(ROWS))
    elif name.endswith(".gz"):
        table.to_json(str(path), compression="gzip")
    elif name == "a.jsonl":
        jsonl(path, ROWS)
    elif name == "a.parquet":
        table.to_parquet(str(path))
    else:
        table.to_csv(str(path), sep="\t" if name == "a.tsv" else ",")
    loaded = load(path)
    assert loaded["prompt"][:] == [row["prompt"] for row in ROWS]
    assert [str(answer) for answer in loaded["answer"]] == ["2", "4", "6"]


def test_files_may_come_as_a_list_or_a_glob(tmp_path):
    jsonl(tmp_path / "part-1.jsonl", ROWS[:1])
    jsonl(tmp_path / "part-2.jsonl", ROWS[1:])
    assert len(load([tmp_path / "part-1.jsonl", str(tmp_path / "part-2.jsonl")])) == 3
    assert len(load(str(tmp_path / "part-*.jsonl"))) == 3


def test_a_folder_of_files_gives_its_splits_by_name(tmp_path):
    jsonl(tmp_path / "my-train.jsonl", ROWS)
    (tmp_path / "dev").mkdir()
    jsonl(tmp_path / "dev" / "part-0.jsonl", ROWS[:1])
    jsonl(tmp_path / "dev" / "part-1.jsonl", ROWS[:1])
    assert len(load(tmp_path)) == 3
    assert len(load(f"{tmp_path}:validation")) == 2
    assert len(load(tmp_path, split="train[:2]")) == 2


def test_files_of_a_folder_that_name_no_split_are_all_of_it(tmp_path):
    jsonl(tmp_path / "a.jsonl", ROWS)
    jsonl(tmp_path / "b.jsonl", ROWS[:1])
    assert len(load(tmp_path)) == 4


def test_a_folder_that_datasets_saved_is_read_back(tmp_path):
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(str(tmp_path / "two"))
    assert len(load(tmp_path / "one")) == 3
    assert len(load(tmp_path / "two")) == 3
    assert len(load(f"{tmp_path / 'two'}:test")) == 1
    assert load(f"{tmp_path / 'two'}:train[1:]")["answer"][:] == ["4", "6"]


def test_a_file_may_be_streamed(tmp_path):
    streamed = load(jsonl(tmp_path / "a.jsonl", ROWS), streaming=True, limit=2)
    assert isinstance(streamed, datasets.IterableDataset)
    assert [row["answer"] for row in streamed] == ["2", "4"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "folder"])
def test_a_stream_has_no_part(tmp_path, name):
    if name == "folder":
        (tmp_path / name).mkdir()
        jsonl(tmp_path / name / "train.jsonl", [*ROWS, {"prompt": "4 + 4 =", "answer": 8}])
    elif name == "a.csv":
        datasets.Dataset.from_list(ROWS).to_csv(str(tmp_path / name))
    else:
        (jsonl if name == "a.jsonl" else lambda path, rows: path.write_text(json.dumps(rows)))(tmp_path / name, ROWS)
    with pytest.raises(DataError, match=r"a stream has no part 'train\[:2\]'"):
        load(f"{tmp_path / name}:train[:2]", streaming=True)


def test_columns_are_renamed_and_the_others_stay_for_the_rewards(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"question": "1 + 1 =", "gold": "2", "level": 3}])
    loaded = load(path, prompt_column="question", columns={"answer": "gold"})
    assert loaded[0] == {"prompt": "1 + 1 =", "answer": "2", "level": 3}


def test_limit_keeps_the_first_rows(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    assert load(path, limit=2)["answer"][:] == ["2", "4"]
    assert len(load(path, limit=100)) == 3
    with pytest.raises(DataError, match="limit is 0"):
        load(path, limit=0)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_system_prompt_makes_messages_of_texts(tmp_path, streaming):
    loaded = load(jsonl(tmp_path / "a.jsonl", ROWS), system_prompt="Be brief.", streaming=streaming)
    first = next(iter(loaded))
    assert first["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 ="}]
    assert first["answer"] == "2"


@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_a_system_prompt_before_many_texts_makes_no_object_of_each(kind):
    texts = [f"{i} + 1 = größer\n" for i in range(2500)]
    rows = datasets.Dataset.from_dict({"prompt": texts, "answer": texts[::-1]})
    rows = rows.cast_column("prompt", datasets.Value(kind)).select(range(2499, -1, -1))
    expected = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}] for text in texts[::-1]]
    tracemalloc.start()
    made = _with_system(rows, "Be brief.", "rows")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 400 * len(texts)  # in Python; objects of each message take 900
    assert (made["prompt"][:], made["answer"][:]) == (expected, texts)


def test_a_second_system_message_is_refused(tmp_path):
    rows = [{"prompt": CHAT}, {"prompt": [{"role": "system", "content": "Mine."}, *CHAT]}]
    with pytest.raises(DataError, match=r"Row 1 .* has a system message of its own"):
        load(jsonl(tmp_path / "a.jsonl", rows), system_prompt="Be brief.")


def test_progress_bars_come_back_as_they_were(tmp_path):
    was_on = datasets.is_progress_bar_enabled()
    load(jsonl(tmp_path / "a.jsonl", ROWS))
    assert datasets.is_progress_bar_enabled() == was_on


# -- what cannot be used, in one sentence ------------------------------------------------------------------------------------


def refused(source, said, **options):
    with pytest.raises(DataError, match=said) as error:
        load(source, **options)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named_with_its_nearest_neighbour(tmp_path):
    jsonl(tmp_path / "train.jsonl", ROWS)
    refused(tmp_path / "trian.jsonl", r"trian.jsonl' does not exist\. Did you mean train.jsonl\?")
    refused(tmp_path / "nowhere" / "a.jsonl", "There is no folder")
    refused("gsm8k.jsonl", "'gsm8k.jsonl' does not exist")
    refused(str(tmp_path / "*.csv"), "does not exist")
    refused([tmp_path / "train.jsonl", tmp_path / "gone.jsonl"], "gone.jsonl' does not exist")
    refused([tmp_path / "train.jsonl", tmp_path], f"'{tmp_path}' is a folder in a list of files; give its files")


def test_the_missing_prompt_column_is_told_with_the_columns_there_are(tmp_path):
    path = jsonl(tmp_path / "gsm8k.jsonl", [{"question": "1 + 1 =", "answer": "2"}])
    refused(path, r"gsm8k.jsonl has no column 'prompt'; it has question, answer\..*--prompt-column question")
    refused(
        path, r"has no column 'qestion'; it has question, answer\. Did you mean question\?", prompt_column="qestion"
    )


def test_a_name_that_is_taken_cannot_be_given(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"question": "1", "prompt": "2"}])
    refused(path, "has a column 'prompt' already", prompt_column="question")
    swapped = load(path, prompt_column="question", columns={"old": "prompt"})
    assert swapped[0] == {"prompt": "1", "old": "2"}


@pytest.mark.parametrize(
    "rows, said",
    [
        ([{"prompt": "a"}, {"prompt": None}], r"Row 1 \(counting from 0\) of .*a.jsonl has no prompt \(null\)"),
        ([{"prompt": "a"}, {"prompt": "  "}], "Row 1 .* has an empty prompt"),
        ([{"prompt": "a"}, {"prompt": 3}], "Row 1 .* prompt of type int"),
        ([{"prompt": 3}, {"prompt": 4}], "Row 0 .* prompt of type int"),
        ([{"prompt": CHAT}, {"prompt": []}], "Row 1 .* empty list of messages"),
        ([{"prompt": [{"role": "user"}]}], "Row 0 .* content is NoneType"),
        ([{"prompt": [{"role": "robot", "content": "hi"}]}], "the role 'robot'; known roles are system"),
        ([{"prompt": ["hello"]}], "Row 0 .* not of the form"),
    ],
)
def test_a_row_without_a_usable_prompt_is_named(tmp_path, rows, said):
    refused(jsonl(tmp_path / "a.jsonl", rows), said)


def test_broken_files_are_told_with_the_line(tmp_path):
    refused(jsonl(tmp_path / "a.jsonl", [ROWS[0], "{nope"]), r"a.jsonl, line 2: not JSON")
    (tmp_path / "c.jsonl").write_bytes(b'{"prompt": "ok"}\n{"prompt": "\xff\xfe"}\n')
    refused(tmp_path / "c.jsonl", r"c.jsonl, line 2: not UTF-8")
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no")
    refused(tmp_path / "d.parquet", "d.parquet cannot be read as parquet")


def test_empty_things_are_told(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    refused(tmp_path / "a.jsonl", "a.jsonl is empty")
    (tmp_path / "b.csv").write_text("prompt,answer\n")
    refused(tmp_path / "b.csv", "b.csv has no rows")
    (tmp_path / "c.json").write_text("[]")
    refused(tmp_path / "c.json", "c.json")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "holds no data set")


def test_splits_that_are_not_there_are_told(tmp_path):
    jsonl(tmp_path / "validation.jsonl", ROWS)
    jsonl(tmp_path / "test.jsonl", ROWS)
    refused(tmp_path, "say which, as in")
    refused(f"{tmp_path}:dev", "dev")
    refused(f"{tmp_path / 'test.jsonl'}:test", "is a file, which has no split 'test'")
    refused(f"{tmp_path}:test", "keep one", split="validation")
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(str(tmp_path / "saved"))
    refused(f"{tmp_path / 'saved'}:trian", r"has no split 'trian'; it has train\. Did you mean train\?")


def test_unknown_and_mixed_formats_are_told(tmp_path):
    (tmp_path / "a.xlsx").write_text("x")
    refused(tmp_path / "a.xlsx", "has no known suffix")
    jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "a.csv").write_text("prompt\nx\n")
    refused([tmp_path / "a.jsonl", tmp_path / "a.csv"], "mixes csv and json files")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "folow:x.jsonl",
            r"begins with 'folow', which is no kind of source\. Did you mean follow\? Those are follow, gym",
        ),
        ("folow:prompts/", r"begins with 'folow', .* Did you mean follow\?"),
        ("verifier:org/env", r"begins with 'verifier', .* Did you mean verifiers\?"),
        ("https://host/x.jsonl", r"begins with 'https', which is no kind of source\. Those are"),
    ],
)
def test_a_mistyped_kind_of_source_is_no_hub_id(name, told):
    refused(name, told)


def test_a_parquet_file_without_rows_is_told_as_such(tmp_path):
    datasets.Dataset.from_dict({"prompt": []}).cast_column("prompt", datasets.Value("string")).to_parquet(
        str(tmp_path / "none.parquet")
    )
    refused(tmp_path / "none.parquet", r"none\.parquet has no rows\.")


def test_a_broken_line_is_told_by_its_number_and_column_alone(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b",\n')
    refused(tmp_path / "a.jsonl", r"line 2: not JSON \(Expecting property name enclosed in double quotes: column 16 ")


@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_of_rows_that_is_named_jsonl_is_told_by_its_name(tmp_path, indent):
    (tmp_path / "a.jsonl").write_text(json.dumps(ROWS, indent=indent))
    refused(tmp_path / "a.jsonl", r"line 1: .*; a file that holds one list of rows is named \.json\.")


def test_a_packed_file_whose_package_is_missing_is_no_file_in_another_encoding(tmp_path, monkeypatch):
    monkeypatch.delitem(fsspec.compression.compr, "zstd", raising=False)
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\x04\x00")
    refused(
        tmp_path / "a.jsonl.zst", r"a\.jsonl\.zst needs the package zstandard to be unpacked: pip install zstandard"
    )


def test_a_mistyped_file_name_is_no_hub_id_alone(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    jsonl(tmp_path / "train.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    refused("train.jsnl", r"neither a file or folder here nor .*Did you mean train\.jsonl\?")


def test_a_hub_id_that_cannot_be_reached_is_told(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    refused("nobody/nothing", "'nobody/nothing' is neither a file or folder here nor on the hub")


# -- data sets that the caller made ----------------------------------------------------------------------------------------


def test_a_data_set_object_is_checked_in_the_same_words():
    table = datasets.Dataset.from_list(ROWS)
    assert check_dataset(table) is table
    assert check_dataset(None) is None
    assert check_dataset(table, prompt_only=True).column_names == ["prompt"]
    with pytest.raises(
        DataError, match=r"train_dataset holds several splits \(train, test\); pass one .* dataset\['train'\]"
    ):
        check_dataset(datasets.DatasetDict(train=table, test=table))
    with pytest.raises(DataError, match=r"is a list, not a datasets.Dataset .*from_list"):
        check_dataset(ROWS)
    with pytest.raises(DataError, match=r"eval_dataset has no column 'prompt'; it has promt\. Did you mean promt"):
        check_dataset(datasets.Dataset.from_list([{"promt": "a"}]), "eval_dataset")
    with pytest.raises(DataError, match="train_dataset is empty"):
        check_dataset(datasets.Dataset.from_dict({"prompt": []}))


def test_a_stream_is_taken_as_it_is():
    streamed = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    assert check_dataset(streamed) is streamed
