"""Real input: GSM8K through the command line with the shipped model, with checkpoints, evaluation and resume."""

import json
from pathlib import Path

import pytest

from covey.cli import main

DATA = Path(__file__).parents[1] / "data" / "gsm8k"


def words(folder, *more):
    given = (
        f"train --model demo --dataset {DATA / 'train.jsonl'} --prompt-column question --reward math --reward format "
        f"--output-dir {folder} --max-completion-length 32 --num-generations 4 --per-device-train-batch-size 8 --logging-steps 1 "
        "--disable-tqdm --use-cpu --learning-rate 1e-3"
    )
    return [*given.split(), *map(str, more)]


@pytest.mark.slow
def test_gsm8k_trains_evaluates_saves_and_goes_on(tmp_path, capsys):
    held_out = ["--eval-dataset", DATA / "test.jsonl", "--max-eval-prompts", 4]
    assert main(words(tmp_path / "run", "--max-steps", 2, "--save-steps", 1, *held_out, "--json")) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"rewards/math/mean", "rewards/format/mean", "eval_reward"} <= set(first["metrics"])
    assert (tmp_path / "run" / "checkpoint-2" / "model.safetensors").is_file()
    assert main(words(tmp_path / "run", "--max-steps", 3, "--save-steps", 1, "--resume", "auto", "--json")) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 3
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]


@pytest.mark.nightly
def test_a_format_reward_rises_on_gsm8k(tmp_path, capsys):
    more = [
        "--max-steps",
        30,
        "--per-device-train-batch-size",
        32,
        "--max-completion-length",
        48,
        "--save-strategy",
        "no",
    ]
    assert main(words(tmp_path / "run", *more)) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = [line["rewards/format/mean"] for line in lines]
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.1, scores
