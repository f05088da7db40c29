"""Messages that say which side, which change and which step: comparing two models, resuming with other parts, a run that is done."""

import json

import pytest

from covey.cli import main
from covey.runs import manifest
from covey.runs.resuming import differences


@pytest.mark.slow
def test_a_comparison_names_both_models_and_which_is_subtracted(capsys):
    words = ["eval", "demo", "--dataset", "demo:test", "--reward", "demo", "--max-prompts", "4", "--max-tokens", "4"]
    assert main([*words, "--compare-to", "demo"]) == 0
    assert "of demo (--compare-to) minus that of demo" in capsys.readouterr().out
    assert main([*words, "--compare-to", "demo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["difference"]
    assert (found["of"], found["minus"]) == ("demo", "demo")


def test_resuming_names_other_rewards_another_adapter_and_another_system_prompt(tmp_path):
    before = {
        "format": manifest.FORMAT,
        "config": {},
        "rewards": [{"name": "mine:one"}],
        "model": {"adapter": {"lora_alpha": 8, "lora_dropout": 0.0}},
        "dataset": {"system_prompt": None},
    }
    (tmp_path / manifest.NAME).write_text(json.dumps(before))
    said = differences(
        tmp_path,
        config={},
        rows=None,
        model={"adapter": {"lora_alpha": 3, "lora_dropout": 0.0}},
        rewards=[{"name": "mine:one"}, {"name": "mine:two"}],
        dataset={"system_prompt": "Be brief"},
    )
    assert len(said) == 3
    assert said[0] == "rewards one -> one, two"
    assert said[1] == "lora_alpha 8 -> 3"
    assert said[2].startswith("system prompt none -> ")


@pytest.mark.slow
def test_resuming_a_run_that_is_done_says_so(tmp_path, capsys):
    words = ["train", "demo", "--max-steps", "1", "--output-dir", str(tmp_path / "run"), "--use-cpu", "true"]
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, "--resume", "auto"]) == 0
    said = capsys.readouterr()
    assert "nothing to do: all 1 steps of" in said.out + said.err
