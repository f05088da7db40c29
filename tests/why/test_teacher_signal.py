"""`covey why` of a run with a teacher: the step is made again, and where the teacher pulls is shown."""

import json

import numpy as np
import pytest
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey.cli import main
from covey.doctor.why.recorded import signal_of
from covey.runs import rollouts
from kit import byte_tokenizer, rest_nightly, tiny_model, tiny_tokenizer


def run(folder, algorithm):
    args = GRPOConfig(
        output_dir=str(folder), algorithm=algorithm, per_device_train_batch_size=8, num_generations=4, max_steps=2, max_completion_length=6,
        learning_rate=1e-2, save_strategy="steps", save_steps=1, rollout_log_steps=1, report_to="none", disable_tqdm=True, use_cpu=True, bf16=False,
    )  # fmt: skip
    GRPOTrainer(
        model=tiny_model("llama"), reward_funcs=lambda completions, **columns: [float(len(c) % 5) for c in completions], args=args,
        train_dataset=Dataset.from_list([{"prompt": "Tom has 3 apples.", "solution": "He has 3."}] * 4), processing_class=tiny_tokenizer(),
    ).train()  # fmt: skip
    return folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "algorithm", rest_nightly(["sdar, feedback=solution, teacher_model_kind=ema", "rlsd, feedback=solution"], 1)
)
def test_a_step_with_a_teacher_is_made_again_and_its_pulls_are_shown(algorithm, tmp_path, capsys):
    folder = run(tmp_path / "run", algorithm)
    assert main(["why", str(folder), "--step", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["grad_norm"]["replayed"] == pytest.approx(shown["grad_norm"]["recorded"], rel=1e-4)
    rows = rollouts.read(folder / "rollouts" / "step-000002.parquet")
    gaps = [np.array(row["token/teacher_gap"]) for row in rows]
    teacher = shown["teacher"]
    assert teacher["informed"] == 8
    assert teacher["gap"] == pytest.approx(np.concatenate(gaps).mean(), rel=1e-5)
    metrics = {row["step"]: row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}
    assert teacher["gap"] == pytest.approx(metrics[2]["teacher/gap"], rel=1e-4)
    assert teacher["agreement"] == pytest.approx(metrics[2]["teacher/agreement"], rel=1e-3)
    largest = max(value for gap in gaps for value in gap)
    assert [pull["gap"] for pull in teacher["up"]][:1] == ([pytest.approx(largest)] if largest > 0 else [])
    assert main(["why", str(folder), "--step", "2"]) == 0
    assert "teacher: a signal on 8 of 8 completions" in capsys.readouterr().out


def test_a_step_without_a_teacher_has_no_signal(tmp_path):
    assert signal_of([{"token_ids": [1, 2], "advantage": 1.0}], tmp_path) is None


def test_what_no_checkpoint_holds_is_refused(tmp_path, capsys):
    folder = run(tmp_path / "run", "opsd, feedback=solution")
    assert main(["why", str(folder), "--step", "2"]) != 0
    assert "the policy of the start" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_of_a_teacher_of_another_tokenizer_the_aligned_tokens_count_alone(tmp_path, capsys):
    theirs = byte_tokenizer()
    tiny_model("llama", seed=3, vocab_size=len(theirs), eos_token_id=0, pad_token_id=0).save_pretrained(tmp_path / "t")
    theirs.save_pretrained(tmp_path / "t")
    folder = run(tmp_path / "run", f"mopd, teacher='{tmp_path / 't'}'")
    rows = rollouts.read(folder / "rollouts" / "step-000002.parquet")
    gaps = [np.array(row["token/teacher_gap"]) for row in rows]
    metrics = {row["step"]: row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}
    every = np.concatenate(gaps)
    assert 0 < np.isnan(every).sum() < len(every)
    assert 1 - np.isnan(every).mean() == pytest.approx(metrics[2]["teacher/aligned"])
    assert np.nanmean(every) == pytest.approx(metrics[2]["teacher/gap"], rel=1e-5)
    assert main(["why", str(folder), "--step", "2", "--json"]) == 0
    teacher = json.loads(capsys.readouterr().out)["teacher"]
    assert teacher["gap"] == pytest.approx(metrics[2]["teacher/gap"], rel=1e-4)
    assert teacher["informed"] / 8 == pytest.approx(metrics[2]["teacher/informed"])
    if "teacher/agreement" in metrics[2]:
        assert teacher["agreement"] == pytest.approx(metrics[2]["teacher/agreement"], rel=1e-3)
