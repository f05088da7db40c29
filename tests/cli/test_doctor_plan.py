"""`covey doctor plan`: one page about GPUs that are not here."""

import json
import re
from types import SimpleNamespace

import pytest

from covey.cli import main
from covey.cli.doctor_plan import rows_in_words
from kit import tiny_model


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["plan"], "--model is missing"),
        (["plan", "--model", "demo"], "--gpus is missing"),
        (["plan", "--model", "demo", "--gpus", "8xH99"], "known: A100"),
        (["plan", "--model", "demo", "--gpus", "H100", "--cluster", "H100"], "leave one out"),
        (["plan", "--model", "demo", "--cluster", "8xH99"], "known: A100"),
        (["plan", "--model", "demo", "--gpus", "8xH100", "--use-vllm", "true", "--vllm-mode", "server"], "--rollout-gpus is missing"),
        (["plan", "--model", "demo", "--gpus", "8xH100", "--rollout-gpus", "2"], "add --use-vllm true --vllm-mode server"),
        (["plan", "--model", "demo", "--gpus", "H100", "--async-rollouts", "true"], "leaves none to learn"),
        (["plan", "--model", "demo", "--gpus", "0xH100", "--fsdp"], "asks for no GPU at all"),
        (["plan", "--model", "Qwen/Qwen2.5-9B", "--gpus", "H100"], "Did you mean Qwen/Qwen2.5-7B?"),
        (["plan", "--model", "demo", "--gpus", "H100", "--prompt-tokens", "0"], "--prompt-tokens 0 must be from 1 to 16777216"),
        (["plan", "--model", "demo", "--gpus", "H100", "--prompt-tokens", f"1{'0' * 23}"], "must be from 1 to 16777216"),
        (["--model", "demo", "--gpus", "H100", "plan", "--mean-completion-tokens", "9999"], "more than --max-completion-length"),
    ],
)  # fmt: skip
def test_a_mistake_gets_one_sentence(words, sentence, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["doctor", *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "devices, hosts, rows, words",
    [
        (True, True, 1200, "up to 1,200 completions fit in a micro-batch"),
        (True, True, 1, "one completion fits in a micro-batch"),
        (False, True, 0, "not one completion fits in a micro-batch"),
        (False, False, 0, "not one completion fits in a micro-batch"),
        (
            True,
            False,
            40,
            "the host memory of a node alone lacks: up to 40 completions fit in a micro-batch on a device",
        ),
    ],
)
def test_the_completions_of_a_micro_batch_in_words(devices, hosts, rows, words):
    assert rows_in_words(SimpleNamespace(fits_devices=devices, fits_hosts=hosts), rows) == words


@pytest.mark.nightly
@pytest.mark.parametrize(
    "model, parameters",
    [
        ("demo", 1_018_496),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
    ],
)
def test_a_plan_names_the_parts_of_a_step_what_fits_and_what_would_pay(model, parameters, capsys):
    asked = [
        "doctor",
        "plan",
        "--model",
        model,
        "--gpus",
        "2xA100",
        "--json",
        "--gradient-accumulation-steps",
        "4",
    ]
    assert main(asked) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["ok"]
    assert said["parameters"] == parameters
    parts = ("rollout", "scoring", "update", "sync")
    assert said["seconds"]["step"] == pytest.approx(sum(said["seconds"][name] for name in parts))
    assert said["memory"]["peak"] < said["memory"]["available"]
    assert said["rows_that_fit"] >= said["rows"] > 8  # a micro-batch fills itself, beyond --per-device-train-batch-size
    changes = " ".join(one["change"] for one in said["changes"])
    assert all(word in changes for word in ("fsdp", "4 GPUs", "asynchronous"))


@pytest.mark.nightly
def test_a_run_that_does_not_fit_is_exit_code_1_and_is_told_what_would(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", "plan", "--model", "Qwen/Qwen2.5-7B", "--gpus", "8xA100"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "of 70.0 GiB: does not fit" in said
    assert "not one completion fits in a micro-batch; a micro-batch begins with" in said
    assert re.search(r"pays a split model \(--fsdp true\): [\d.]+ s a step, [\d.]+ GiB at the peak; it would fit", said)
    assert "asked of a run that fits" in said


@pytest.mark.nightly
def test_a_cluster_lists_the_combinations_that_fit_with_the_options_of_each(tmp_path, capsys):
    tiny_model().config.save_pretrained(tmp_path)
    words = ["--model", str(tmp_path / "config.json"), "--cluster", "1x2xA100", "--async-rollouts", "true"]
    assert main(["doctor", "plan", *words, "--json"]) == 0
    captured = capsys.readouterr()
    assert "--cluster decides --async-rollouts" in captured.err
    found = json.loads(captured.out.splitlines()[-1])
    assert (found["ok"], found["gpus"], found["nearest"]) == (True, 2, None)
    first = found["combinations"][0]
    assert first["seconds"]["step"] == min(choice["seconds"]["step"] for choice in found["combinations"])
    served = next(
        choice for choice in found["combinations"] if {"vLLM server", "asynchronous"} <= set(choice["features"])
    )
    assert (served["learners"], served["writers"]) == (1, 1)
    assert {"use_vllm": True, "vllm_mode": "server", "async_rollouts": True}.items() <= served["options"].items()
