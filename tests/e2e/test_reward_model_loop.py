"""Policy, reference and reward model: a run's rollouts become pairs, pairs a reward model, and that trains the next policy."""

import json

import pytest

from covey.cli import main


def train(folder, *words):
    common = [
        "train",
        "--model",
        "demo",
        "--dataset",
        "demo",
        "--max-completion-length",
        "32",
        "--learning-rate",
        "5e-4",
    ]
    common += [
        "--use-cpu",
        "--report-to",
        "none",
        "--logging-steps",
        "1",
        "--save-strategy",
        "no",
        "--disable-tqdm",
        "true",
    ]
    assert main([*common, "--output-dir", str(folder), *words]) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_reward_model_of_a_runs_own_pairs_trains_a_policy_beside_a_reference(tmp_path, capsys):
    batch = ("--per-device-train-batch-size", "64", "--rollout-log-steps", "1")
    train(tmp_path / "first", "--reward", "length(target=0)", "--max-steps", "4", *batch)
    pairs, judge = tmp_path / "pairs.jsonl", tmp_path / "judge"
    assert main(["export", "pairs", str(tmp_path / "first"), "-o", str(pairs)]) == 0
    words = ["reward", "train", "--model", "demo", "--dataset", str(pairs), "-o", str(judge), "--use-cpu", "--json"]
    assert main([*words, "--held-out", "0.3", "--epochs", "6", "--learning-rate", "1e-3", "--batch-size", "8"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["accuracy"] > 0.7
    held_out = (
        "--eval-dataset",
        "demo:test",
        "--max-eval-prompts",
        "48",
        "--eval-on-start",
        "true",
        "--eval-strategy",
        "steps",
    )
    second = train(
        tmp_path / "second", "--reward", str(judge), "--algorithm", "grpo, kl=0.04", "--max-steps", "16", "--eval-steps", "16",
        "--lr-scheduler-type", "constant", *held_out, *batch,
    )  # fmt: skip
    assert second[-1]["kl"] > 0
    lines = (tmp_path / "second" / "evaluations.jsonl").read_text().splitlines()
    judged = [json.loads(line) for line in lines]
    rewards = [one["eval_reward"] for one in judged]
    lengths = [one["eval_completions/mean_length"] for one in judged]
    assert rewards[-1] > rewards[0] + 0.1
    assert lengths[-1] < lengths[0]  # what the pairs preferred
