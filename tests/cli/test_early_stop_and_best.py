"""A run stops when evaluations bring nothing better, and ends with the weights of its best one."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from covey import GRPOConfig, GRPOTrainer
from covey.cli import main
from covey.cli.train import _of_best
from covey.process.lean import TrainerState
from covey.training import saving
from kit import rest_nightly, tiny_model, tiny_tokenizer

REWARD = "def digits(completions, **kwargs):\n    return [sum(c.isdigit() for c in text) / 8 for text in completions]\n"
WHAT = "--model model --dataset train.jsonl --eval-dataset test.jsonl --reward mine.py:digits --output-dir run"
SMALL = "--max-completion-length 6 --num-generations 4 --per-device-train-batch-size 8 --use-cpu --disable-tqdm"
EVALUATED = "--eval-strategy steps --eval-steps 2 --eval-on-start --save-strategy best --logging-steps 1"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model(layers=1).save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    for name, count in (("train", 6), ("test", 3)):
        rows = [{"prompt": f"What is {i} + {i}?"} for i in range(count)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("mine.py").write_text(REWARD)
    return tmp_path


def words(*more):
    return ["train", *WHAT.split(), *SMALL.split(), *EVALUATED.split(), *more]


def evaluations(run):
    return [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]


def test_a_run_that_does_not_get_better_stops(place, capsys):
    still = ["--learning-rate", "0", "--max-steps", "40", "--early-stopping-patience", "2", "--json"]
    assert main(words(*still)) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 4  # as at the start at step 2 and at step 4
    assert [row["step"] for row in evaluations(place / "run")] == [0, 2, 4]


@pytest.mark.slow
def test_a_model_that_training_makes_no_better_is_given_back_as_it_came(place, capsys):
    still = ["--learning-rate", "0", "--max-steps", "4", "--load-best-model-at-end"]
    assert main(words(*still)) == 0
    assert "no checkpoint was saved" not in capsys.readouterr().err
    assert [path.name for path in (place / "run").glob("checkpoint-*")] == ["checkpoint-0"]
    again = ["--learning-rate", "0.1", "--max-steps", "2", "--resume", "run/checkpoint-0", "--save-strategy", "steps"]
    assert main(words(*again, "--save-steps", "2")) == 0
    assert (place / "run" / "checkpoint-2").is_dir(), "a run can begin again from it"


def test_a_run_ends_with_the_weights_of_its_best_evaluation(place, capsys):
    assert (
        main(words("--learning-rate", "0.1", "--max-steps", "12", "--load-best-model-at-end", "--seed", "0", "--json"))
        == 0
    )
    shown = capsys.readouterr()
    found = {row["step"]: row["eval_reward"] for row in evaluations(place / "run")}
    best = max(found, key=lambda step: (found[step], -step))
    assert best not in (0, 12)  # the seed is one where the best is in between, or this would prove little
    assert json.loads(shown.out)["metrics"]["eval_reward"] == pytest.approx(found[best])
    assert f"ends with the weights of step {best}, its best evaluation" in shown.err
    ended = load_file(place / "run" / "model" / "model.safetensors")
    kept = load_file(place / "run" / f"checkpoint-{best}" / "model.safetensors")
    assert all(torch.equal(ended[name], kept[name]) for name in kept)


class Judged(GRPOTrainer):
    """A trainer whose evaluations have these scores, by step."""

    scores: tuple[float, ...] = ()

    def evaluate(self, *args, **named):
        return {**super().evaluate(*args, **named), "eval_score": self.scores[self.state.global_step - 1]}


def judged(folder, scores, **options):
    one = Judged(
        model=tiny_model(),
        processing_class=tiny_tokenizer(),
        reward_funcs=lambda completion_ids, **columns: [float(sum(ids) % 7) for ids in completion_ids],
        train_dataset=Dataset.from_dict({"prompt": ["2 + 2 =", "Tom has"]}),
        eval_dataset=Dataset.from_dict({"prompt": ["2 + 2 ="]}),
        args=GRPOConfig(
            output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, num_generations=2,
            per_device_train_batch_size=2, per_device_eval_batch_size=2, max_completion_length=4, max_steps=6,
            learning_rate=1e-2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=2,
            load_best_model_at_end=True, metric_for_best_model="score", greater_is_better=True, **options,
        ),
    )  # fmt: skip
    one.scores = scores
    return one


@pytest.mark.parametrize("options", rest_nightly([{}, {"ema_decay": 0.5}], 1), ids=["weights", "average"])
def test_the_best_evaluation_that_has_a_checkpoint_keeps_it_while_a_better_one_has_none(tmp_path, options):
    one = judged(tmp_path / "run", (1.0, 2.0, 3.0, 0.0, 0.0, 0.0), save_total_limit=1, **options)
    one.train()
    best = tmp_path / "run" / "checkpoint-2"
    assert Path(one.state.best_model_checkpoint) == best
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-6"]
    ends, saved = one.model.state_dict(), load_file(best / "model.safetensors")
    assert all(torch.equal(ends[name], value) for name, value in saved.items()) == (not options)


def test_a_best_checkpoint_that_is_still_written_when_a_better_evaluation_comes_is_kept(tmp_path, monkeypatch):
    one = judged(tmp_path / "run", (1.0, 2.0, 3.0, 0.0, 0.0, 0.0), save_total_limit=1)
    write, written = saving._write, []

    def write_late(*given):
        while not written and one.state.best_global_step < 3:
            time.sleep(0.001)
        written.append(one.state.best_global_step)
        write(*given)

    monkeypatch.setattr(saving, "_write", write_late)
    one.train()
    assert written[0] == 3
    assert Path(one.state.best_model_checkpoint) == tmp_path / "run" / "checkpoint-2"
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-6"]


@pytest.mark.nightly
@pytest.mark.parametrize("moved", rest_nightly([False, True], 1), ids=["gone", "moved"])
def test_a_run_whose_best_checkpoint_was_moved_or_deleted_ends_all_the_same(tmp_path, caplog, moved):
    scores = (1.0, 3.0, 0.0, 0.0, 0.0, 0.0)
    one = judged(tmp_path / "run", scores)
    one.train()
    place = (tmp_path / "run").rename(tmp_path / "elsewhere")
    best = load_file(place / "checkpoint-2" / "model.safetensors")
    if not moved:
        shutil.rmtree(place / "checkpoint-2")
    shutil.rmtree(place / "checkpoint-6")
    again = judged(place, scores)
    with caplog.at_level("WARNING"):
        again.train(resume_from_checkpoint=True)
    ends = again.model.state_dict()
    assert all(torch.equal(ends[name], value) for name, value in best.items()) == moved
    assert ("the checkpoint of the best evaluation, is not there any more" in caplog.text) == (not moved)


def test_a_moved_run_that_goes_on_in_another_folder_ends_with_its_best_weights(tmp_path):
    scores = (1.0, 3.0, 0.0, 0.0, 0.0, 0.0)
    judged(tmp_path / "run", scores).train()
    place = (tmp_path / "run").rename(tmp_path / "elsewhere")
    again = judged(tmp_path / "new", scores)
    again.train(resume_from_checkpoint=str(place / "checkpoint-6"))
    assert Path(again.state.best_model_checkpoint) == place / "checkpoint-2"
    best, ends = load_file(place / "checkpoint-2" / "model.safetensors"), again.model.state_dict()
    assert all(torch.equal(ends[name], value) for name, value in best.items())


@pytest.mark.slow
def test_a_best_checkpoint_that_was_changed_on_the_disk_is_not_taken(tmp_path, caplog):
    scores = (1.0, 3.0, 0.0, 0.0, 0.0, 0.0)
    one = judged(tmp_path / "run", scores)
    one.train()
    last = load_file(tmp_path / "run" / "checkpoint-6" / "model.safetensors")
    weights = tmp_path / "run" / "checkpoint-2" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1  # one bit of a weight, which stays finite
    weights.write_bytes(content)
    again = judged(tmp_path / "run", scores)
    with caplog.at_level("WARNING"):
        again.train(resume_from_checkpoint=True)
    assert (
        "the checkpoint of the best evaluation, is damaged (model.safetensors has changed since it was written)"
        in caplog.text
    )
    assert all(torch.equal(again.model.state_dict()[name], value) for name, value in last.items())
    assert again.state.best_model_checkpoint is None


def test_scores_of_best_weights_that_were_deleted_are_not_shown_as_the_runs(tmp_path):
    best = tmp_path / "checkpoint-2"
    best.mkdir()
    history = [{"step": 2, "eval_reward": 9.0}]
    state = TrainerState(best_global_step=2, best_model_checkpoint=str(best), log_history=history)
    config = GRPOConfig(str(tmp_path), load_best_model_at_end=True, metric_for_best_model="reward", eval_strategy="steps", eval_steps=2,
                        save_steps=2, report_to="none")  # fmt: skip
    assert _of_best(config, state) == {"eval_reward": 9.0}
    best.rmdir()
    assert _of_best(config, state) == {}


@pytest.mark.nightly
def test_a_best_evaluation_without_a_checkpoint_is_told(place, capsys):
    saved_late = ["--save-strategy", "steps", "--save-steps", "4", "--max-steps", "2", "--load-best-model-at-end"]
    assert main(words("--learning-rate", "0.1", *saved_late)) == 0
    said = capsys.readouterr().err
    assert "where no checkpoint was saved; the run ends with its last weights" in said
    assert "save_strategy='best'" in said
