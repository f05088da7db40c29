"""`covey reward test` from the command line: table, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.cli import main

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k" / "test.jsonl"


def test_a_sound_reward_needs_no_data_set_and_passes(capsys):
    assert main(["reward", "test", "--reward", "exact", "--rows", "4"]) == 0
    shown = capsys.readouterr().out
    assert "gold: as in the data *" in shown
    assert "garbage: empty" in shown
    assert "FAIL" not in shown


def test_a_reward_of_the_users_own_that_pays_empty_text_fails_with_exit_code_3(tmp_path, capsys):
    data, own = tmp_path / "data.jsonl", tmp_path / "own.py"
    data.write_text("".join(json.dumps({"question": f"{i} + 1?", "label": str(i + 1)}) + "\n" for i in range(411, 419)))
    own.write_text(
        "def wrong(completions, label, **columns):\n"
        "    return [float(not c or c.endswith(l)) for c, l in zip(completions, label)]\n"
    )
    words = [
        "reward",
        "test",
        "--reward",
        f"{own}:wrong",
        "--dataset",
        str(data),
        "--prompt-column",
        "question",
        "--json",
    ]
    assert main(words) == 3
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["ok"], found["gold_column"]) == (False, "label")
    failed = [v for v in found["rewards"][0]["verdicts"] if v["level"] == "FAIL"]
    assert [v["probe"] for v in failed] == ["empty"]


def test_strict_makes_warnings_fail(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def anywhere(completions, answer): return [float(a in c) for c, a in zip(completions, answer)]\n")
    words = ["reward", "test", "--reward", f"{own}:anywhere", "--rows", "4"]
    assert main(words) == 0
    assert main([*words, "--strict"]) == 3


def test_a_wrong_number_of_values_is_a_failure_and_not_a_traceback(tmp_path, capsys):
    own = tmp_path / "own.py"
    own.write_text("def one(completions): return [1.0]\n")
    assert main(["reward", "test", "--reward", f"{own}:one", "--rows", "4"]) == 3
    assert "FAIL  contract" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, said",
    [
        (["reward"], "covey reward test --reward"),
        (["reward", "test"], "needs --reward"),
        (["reward", "test", "--reward", "mth"], "Did you mean math?"),
        (["reward", "test", "--reward", "json_schema"], "needs a column schema"),
        (["reward", "test", "--reward", "exact", "--gold-column", "x"], "--gold-column x"),
        (["reward", "test", "--reward", "exact", "--rows", "0"], "--rows 0"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(words, said, capsys):
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown


@pytest.mark.nightly
def test_exact_is_sound_on_gsm8k(capsys):
    words = ["reward", "test", "--reward", "exact", "--dataset", str(GSM8K), "--prompt-column", "question", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["rewards"][0]["wording"] == "as in the data"
