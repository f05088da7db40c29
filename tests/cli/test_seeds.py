"""`covey train --seeds N`: one run a seed, a mean with its interval, and an interrupted series goes on where it was."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from covey.cli import main
from covey.errors import RunFolderError
from covey.experiments import series
from covey.experiments.several import shown_metrics, summary
from kit import tiny_model, tiny_tokenizer

REWARD = "def digits(completions, **kwargs):\n    return [sum(c.isdigit() for c in text) / 8 for text in completions]\n"
WHAT = "--model model --dataset train.jsonl --eval-dataset test.jsonl --reward mine.py:digits --output-dir runs/a"
SMALL = "--max-completion-length 6 --num-generations 4 --per-device-train-batch-size 8 --learning-rate 1e-3 --use-cpu"


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
    return ["train", *WHAT.split(), *SMALL.split(), "--disable-tqdm", *map(str, more)]


@pytest.mark.nightly
def test_each_seed_is_a_run_and_one_seed_more_keeps_those_that_ended(place, capsys):
    assert main(words("--max-steps", 1, "--seeds", 1, "--json")) == 0
    first = json.loads(capsys.readouterr().out)["seeds"]["0"]["metrics"]["eval_reward"]
    before = (place / "runs" / "a" / "seed-0" / "metrics.jsonl").stat().st_mtime_ns
    assert main(words("--max-steps", 1, "--seeds", 2, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    values = [found["seeds"][seed]["metrics"]["eval_reward"] for seed in ("0", "1")]
    assert values[0] == first
    assert found["summary"]["eval_reward"]["mean"] == pytest.approx(sum(values) / 2)
    assert (place / "runs" / "a" / "seed-0" / "metrics.jsonl").stat().st_mtime_ns == before
    for seed in (0, 1):
        recorded = json.loads((place / "runs" / "a" / f"seed-{seed}" / "run.json").read_text())
        assert (recorded["config"]["seed"], recorded["state"]) == (seed, "finished")
    # nothing is left to do: the table of what there is
    assert main(words("--max-steps", 1, "--seeds", 2)) == 0
    assert "on average (95%" in capsys.readouterr().out


@pytest.mark.nightly
def test_an_interrupted_series_goes_on_with_the_seed_that_it_was_at(place, capsys):
    command = [sys.executable, "-m", "covey", *words("--max-steps", 60, "--seeds", 2, "--logging-steps", 1)]
    metrics = place / "runs" / "a" / "seed-0" / "metrics.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        for _ in range(2400):
            if process.poll() is not None or (metrics.is_file() and metrics.read_text().count("\n") >= 2):
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "go on with: covey train" in said
    reached = json.loads((metrics.parent / "run.json").read_text())["step"]
    assert 2 <= reached < 60
    assert main(words("--max-steps", 60, "--seeds", 2, "--logging-steps", 1)) == 0
    recorded = json.loads((metrics.parent / "run.json").read_text())
    assert [attempt["from_step"] for attempt in recorded["attempts"]] == [0, reached]
    assert set(json.loads((place / "runs" / "a" / "seeds.json").read_text())) == {"0", "1"}


@pytest.mark.nightly
def test_a_seed_that_was_stopped_in_its_last_evaluation_is_evaluated_again(place, capsys):
    assert main(words("--max-steps", 2, "--save-steps", 2, "--seeds", 1, "--json")) == 0
    first = json.loads(capsys.readouterr().out)["seeds"]["0"]
    (place / "runs" / "a" / "seeds.json").unlink()  # as if it had not come to its end
    assert main(words("--max-steps", 2, "--save-steps", 2, "--seeds", 1, "--json")) == 0
    again = json.loads(capsys.readouterr().out)["seeds"]["0"]
    assert again["steps"] == first["steps"] == 2
    assert again["metrics"]["eval_reward"] == first["metrics"]["eval_reward"]


@pytest.mark.nightly
def test_wrong_input_stops_before_the_second_seed(place, capfd):
    Path("mine.py").write_text("def digits(completions, nothing):\n    return completions\n")
    assert main(words("--max-steps", 1, "--seeds", 2)) == 2
    said = capfd.readouterr().err
    assert "needs a column nothing" in said
    assert "seed 1" not in said


@pytest.mark.parametrize(
    "more, said", [(["--seeds", "0"], "--seeds 0 must be at least 1"), (["--resume", "x"], "leave --resume out")]
)
def test_flags_that_make_no_series_are_refused(place, capsys, more, said):
    assert main(words("--seeds", "2", *more)) == 2
    assert said in capsys.readouterr().err


def test_a_launcher_is_refused(place, capsys, monkeypatch):
    from covey.errors import ConfigError
    from covey.experiments import child

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="without accelerate launch"):
        child.refuse_launcher("--seeds")


def test_a_folder_of_other_options_or_of_a_single_run_is_refused(tmp_path):
    series.claim(tmp_path / "a", {"learning_rate": 0.1}, "seeds")
    series.claim(tmp_path / "a", {"learning_rate": 0.1}, "seeds")
    with pytest.raises(RunFolderError, match=r"other options \(learning_rate\)"):
        series.claim(tmp_path / "a", {"learning_rate": 0.2}, "seeds")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.json").write_text("{}")
    with pytest.raises(RunFolderError, match="holds a single run"):
        series.claim(tmp_path / "b", {"learning_rate": 0.1}, "seeds")


def test_the_summary_is_students_interval_over_seeds():
    results = {
        i: {"steps": 1, "metrics": {"eval_reward": value, "reward": 0.0}} for i, value in enumerate((1.0, 2.0, 3.0))
    }
    found = summary(results)
    # mean 2, deviation 1, t(0.975, 2) = 4.303: 2 -+ 4.303 / sqrt(3)
    assert list(found) == ["eval_reward"]
    assert (found["eval_reward"].value, found["eval_reward"].low) == pytest.approx((2.0, -0.4841), abs=1e-3)


def test_held_out_rewards_are_shown_one_by_one_where_there_are_several():
    assert shown_metrics([{"reward": 1.0}]) == ["reward"]
    two = {"eval_reward": 1, "eval_rewards/a/mean": 1, "eval_rewards/b/mean": 0, "eval_rewards/a/std": 0}
    assert shown_metrics([two]) == ["eval_reward", "eval_rewards/a/mean", "eval_rewards/b/mean"]
