"""`covey doctor memory`: the prediction, what would lower it, and the longest micro-batch tried."""

import json

import pytest

from covey.cli import main

SMALL = ["--model", "demo", "--per-device-train-batch-size", "8", "--max-completion-length", "16", "--use-cpu"]


LOWERED = ["--optim", "adamw_bnb_8bit", "--lora-r", "16"]
"""Options in force, so that a test does not wait for what they would save."""


def found(capsys, *more):
    code = main(["doctor", "memory", *SMALL, "--json", *more])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.nightly
def test_it_needs_a_model_and_neither_data_nor_rewards(capsys):
    few = ["--no-gradient-checkpointing", "--max-tokens-per-microbatch", "1024"]
    code, said = found(capsys, "--prompt-tokens", "20", *LOWERED, *few)
    assert code == 0
    assert said["ok"]
    assert said["prompt_tokens"] == 20
    assert said["memory"]["peak"] > said["memory"]["weights"] > 0
    assert list(said["lower"]) == ["--gradient-checkpointing"]
    assert "8 completions of 16 tokens behind prompts of 20, fits: tried" in said["findings"][-1]["said"]


@pytest.mark.nightly
def test_the_word_may_stand_behind_options_and_nothing_is_loaded_where_only_the_prediction_is_asked_for(capsys):
    assert main(["doctor", *SMALL, "memory", "--predict-only"]) == 0
    said = capsys.readouterr().out
    assert "peak" in said
    assert "GiB free" in said
    assert "tried" not in said


@pytest.mark.nightly
def test_a_data_set_says_how_long_the_prompts_are(capsys):
    assert found(capsys, "--predict-only")[1]["prompt_tokens"] == 512
    assert found(capsys, "--predict-only", "--dataset", "demo")[1]["prompt_tokens"] < 100


@pytest.mark.nightly
def test_what_would_lower_the_peak_does_and_what_is_in_force_is_not_named(capsys):
    plain = ["--predict-only", "--no-gradient-checkpointing"]
    _, said = found(capsys, *plain)
    assert "--gradient-checkpointing" in said["lower"]
    for spelled, peak in said["lower"].items():
        _, changed = found(capsys, *plain[:1], *(plain[1:] if "checkpointing" not in spelled else []), *spelled.split())
        assert changed["memory"]["peak"] == peak < said["memory"]["peak"]
        assert spelled not in changed["lower"]


@pytest.mark.nightly
def test_a_run_that_cannot_fit_fails_before_anything_is_loaded(capsys):
    huge = ["--max-completion-length", "9000000", "--max-tokens-per-microbatch", "90000000"]
    code, said = found(capsys, *huge, *LOWERED, "--gradient-checkpointing")
    assert code == 1
    assert not said["ok"]
    assert [finding["status"] for finding in said["findings"]] == ["FAIL"]


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["memory"], "--model is missing"),
        (["memory", "--model", "./nowhere"], "The model folder './nowhere' does not exist."),
        (["memory", "--model", "demo", "--prompt-tokens", "0"], "--prompt-tokens 0 must be at least 1"),
        (["memry", "--model", "demo"], "There is no file memry. Did you mean memory?"),
    ],
)
def test_a_mistake_gets_one_sentence(words, sentence, capsys):
    assert main(["doctor", *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said
