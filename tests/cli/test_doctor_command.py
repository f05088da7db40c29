"""`covey doctor`: rows with a fix, an exit code, JSON; nothing is written."""

import json
from pathlib import Path

import pytest

from covey.cli import main

SMALL = "--per-device-train-batch-size 32 --num-generations 4 --max-completion-length 32 --max-steps 10 --use-cpu"
DEMO = ["doctor", "demo", *SMALL.split(), "--sample-prompts", "4", "--max-prompts", "100"]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_a_run_in_order_is_exit_code_0_and_leaves_nothing_behind(capsys):
    assert main(DEMO) == 0
    out = capsys.readouterr().out
    assert "PASS  signal" in out
    assert "PASS  memory" in out
    assert "0 failed: ready to train" in out
    assert list(Path().iterdir()) == []


@pytest.mark.nightly
def test_rows_fit_a_narrow_terminal_and_warn_of_a_rate_at_which_a_small_model_does_not_move(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    main([*DEMO, "--sample-prompts", "0", "--learning-rate", "1e-6"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 60
    assert "hardly moves at it" in " ".join(out.split())


@pytest.mark.nightly
def test_a_fault_is_exit_code_1_with_what_to_do_below_it(capsys):
    Path("mine.py").write_text("def flat(completions):\n    return [1.0 for _ in completions]\n")
    assert main([*DEMO, "--reward", "mine.py:flat"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  signal       0 of 4 groups would carry signal" in out
    assert "-> take prompts that the model answers right sometimes" in out.replace("\n" + " " * 22, " ")
    assert "mend what failed" in out


@pytest.mark.nightly
def test_json_is_one_object_with_every_finding(capsys):
    assert main([*DEMO, "--sample-prompts", "0", "--json", "--learning-rate", "6e-4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert sum(found["counts"].values()) == len(found["findings"])
    memory = next(one for one in found["findings"] if one["area"] == "memory")
    assert 0 < memory["facts"]["predicted"] < memory["facts"]["available"]


def test_it_reads_the_same_file_as_train(capsys):
    Path("run.yaml").write_text("model: demo\ndataset: nowhere.jsonl\nreward: [demo]\nuse_cpu: true\n")
    assert main(["doctor", "run.yaml", "--sample-prompts", "0"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  data" in out
    assert "nowhere.jsonl" in out


def test_what_is_missing_or_mistyped_is_exit_code_2(capsys):
    assert main(["doctor", "--model", "demo"]) == 2
    assert "--dataset is missing" in capsys.readouterr().err
    assert main([*DEMO, "--sample-promts", "4"]) == 2
    assert "Did you mean --sample-prompts?" in capsys.readouterr().err
