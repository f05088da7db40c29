"""Files of others: endless, deep, wide, silent or foreign ones end in one sentence and exit code 2."""

from __future__ import annotations

import json
import os

import pytest

from covey.cli import main
from covey.data import load
from covey.errors import ConfigError, DataError, ModelError
from covey.files.bounded import json_depth, read_json, yaml_of
from covey.files.places import looks_local, refuse_missing

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    "content",
    [b"model: " + b"[" * 100_000, b"- " * 100_000, BOMB.encode(), b"model: &a [*a]\n", b"# " + b"x" * (5 << 20)],
    ids=["brackets", "dashes", "a bomb of aliases", "a list in itself", "too long"],
)
def test_yaml_out_of_bounds_is_one_sentence(content, tmp_path, capsys):
    (tmp_path / "x.yaml").write_bytes(content)
    assert main(["train", str(tmp_path / "x.yaml")]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert shown.count("\n") == 1


def test_yaml_from_an_endless_device_or_a_silent_pipe_ends(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("covey.files.bounded._PATIENCE_SECONDS", 0.2)
    os.mkfifo(tmp_path / "pipe.yaml")
    assert main(["train", "/dev/zero"]) == 2
    assert "longer than 4 MiB" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "pipe.yaml")]) == 2
    assert "says nothing" in capsys.readouterr().err


def test_json_is_measured_outside_of_its_texts(tmp_path):
    assert json_depth(b'{"a": "[[[[[[[' + b"[" * 100 + b'", "b": [[1]]}') == 3
    escaped = json.dumps({'\\"[[': ["[" * 100, "\\", '"{', {"a": "\\\\"}, "]"]})
    assert json_depth(escaped.encode()) == 3
    (tmp_path / "config.json").write_bytes(b"[" * 100_000)
    with pytest.raises(ModelError, match="nested more than"):
        read_json(tmp_path / "config.json", ModelError)


def test_aliases_that_stay_small_are_fine():
    assert yaml_of("a: &a [1, 2]\nb: *a\n", "x")[1] == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize("shape", [b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000])
def test_rows_that_are_nested_too_deep_are_named(shape, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "x"}\n{"prompt": "x", "a": ' + shape + b"}\n")
    with pytest.raises(DataError, match="line 2 is nested more than 500 deep"):
        load(str(tmp_path / "a.jsonl"))


def test_a_row_longer_than_any_row_is_named(tmp_path):
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.write(b'{"prompt": "')
        file.truncate(70 << 20)  # a hole costs no disk
    with pytest.raises(DataError, match="line 1 is longer than 64 MiB"):
        load(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    "name", ["./x", "/x/y", "~/x", "a/b/c", "x.jsonl", "data/x.csv", "x.safetensors", "x y", "src/"]
)
def test_a_name_that_is_written_like_a_path_is_no_name_of_the_hub(name):
    assert looks_local(name)


def test_a_name_of_the_hub_is_not_looked_for_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not looks_local("Qwen/Qwen2.5-0.5B-Instruct")
    refuse_missing("Qwen/Qwen2.5-0.5B-Instruct", "model folder")
    for name in ("verifiers:gsm8k:test", "gym:leg_counting[:5]", "follow:later.jsonl"):
        refuse_missing(name, "data set")
    (tmp_path / "runs").mkdir()
    with pytest.raises(ModelError, match="does not exist"):
        refuse_missing("runs/nosuch", "model folder")


@pytest.mark.parametrize(
    "line",
    [
        "reward train --model runs/judg --dataset pairs.jsonl -o runs/new",
        "reward test --reward runs/judg --dataset pairs.jsonl",
        "features pairs.jsonl --features embedding --embedding-model runs/judg --output graded.jsonl",
        "env check games.py:Game --model runs/judg",
    ],
)
def test_a_misspelt_folder_of_a_model_is_named_by_every_command(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "judge").mkdir(parents=True)
    (tmp_path / "pairs.jsonl").write_text(
        '{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "d", "chosen": "b", "rejected": "c"}\n'
    )
    (tmp_path / "games.py").write_text(
        "class Game:\n    def reset(self): ...\n    def go(self, to: str) -> str:\n"
        '        """Go.\n\n        Args:\n            to: where\n        """\n        return "x"\n'
    )
    assert main(line.split()) == 2
    assert "'runs/judg' does not exist. Did you mean judge?" in capsys.readouterr().err


def test_one_value_stands_for_a_list_of_one(tmp_path, capsys):
    (tmp_path / "x.yaml").write_text("model: demo\ndataset: demo\nreward: math\nreport_to: none\nmetrics_by: answer\n")
    assert main(["train", str(tmp_path / "x.yaml"), "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert "reward:\n- math" in shown
    assert "metrics_by:\n- answer" in shown


@pytest.mark.parametrize("name", ["os:abort", "os:system", "sys:exit", "json:JSONDecoder", "subprocess:run"])
def test_an_imported_name_that_is_no_algorithm_is_refused_without_calling_a_builtin(name):
    from covey.algorithms import from_name

    with pytest.raises(ConfigError, match=r"Algorithm"):
        from_name(name)


@pytest.mark.parametrize(
    "words", [["eval", "demo", "--dataset", "demo", "--reward", "demo"], ["chat", "demo"], ["demo"]]
)
@pytest.mark.parametrize("seed", ["-1", "4294967296"])
def test_a_seed_that_no_generator_takes_is_refused_by_every_verb(words, seed, capsys):
    assert main([*words, "--seed", seed]) == 2
    assert capsys.readouterr().err == f"error: --seed {seed} must be between 0 and 4294967295.\n"


def test_the_data_check_refuses_a_line_without_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("covey.doctor.data_check.rows.LONGEST_LINE", 1 << 20)
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "' + b"a" * (1 << 20) + b'"}\n')
    assert main(["data", "check", str(tmp_path / "rows.jsonl")]) != 0
    assert "line 2 is longer than 1 MiB; a row is one line" in capsys.readouterr().err
