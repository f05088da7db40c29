"""`covey env --issue [RUN]`: what an issue needs, without secrets."""

import json

import pytest

from covey.cli import main


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run.json").write_text(
        json.dumps(
            {
                "config": {"beta": 0.04, "learning_rate": 1e-6},
                "model": {"name": "org/tiny"},
                "step": 9,
                "state": "running",
            }
        )
    )
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "reward": 0.123456}) + "\n" for step in range(9))
    )
    (tmp_path / "alerts.jsonl").write_text(json.dumps({"rule": "plateau", "said": "```evil\x1b[31m"}) + "\n")
    return tmp_path


def test_an_issue_has_the_machine_and_masks_secrets(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert main(["env", "--issue"]) == 0
    text = capsys.readouterr().out
    assert "**Machine**" in text
    assert "torch " in text
    assert "HF_TOKEN=(set)" in text
    assert "hf_secret" not in text


def test_an_issue_of_a_run_has_its_changed_options_last_steps_and_alerts(folder, capsys):
    assert main(["env", "--issue", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "beta: 0.04" in text
    assert "learning_rate" not in text
    assert "model: org/tiny" in text
    assert "step 8, reward 0.1235" in text
    assert "step 5" not in text
    assert text.count("```") % 2 == 0
    assert "\x1b" not in text


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert main(["env", "--issue", str(tmp_path)]) == 2
    assert "holds no run.json; give the folder of a run" in capsys.readouterr().err
