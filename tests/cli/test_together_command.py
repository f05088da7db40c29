"""`covey train --adapters N` and `--vary`: one process, one base, a run folder for each, and the same command goes on."""

import json
from pathlib import Path

import pytest

from covey.cli import main
from kit import tiny_model, tiny_tokenizer

REWARD = (
    "def digits(completions, **kwargs):\n    return [sum(c.isdigit() for c in text) / 8 for text in completions]\n"
    "def vowels(completions, **kwargs):\n    return [sum(c in 'aeiou' for c in text) / 8 for text in completions]\n"
    "def broken(completions, **kwargs):\n    raise OSError('the judge is gone')\n"
)
WHAT = "--model model --dataset train.jsonl --reward mine.py:digits --lora-r 2 --output-dir runs/a"
SMALL = "--max-completion-length 4 --num-generations 4 --per-device-train-batch-size 4 --learning-rate 1e-3 --use-cpu"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model(layers=1).save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    rows = [{"prompt": f"What is {i} + {i}?"} for i in range(6)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("mine.py").write_text(REWARD)
    return tmp_path


def words(*more):
    return ["train", *WHAT.split(), *SMALL.split(), "--disable-tqdm", "--max-steps", "1", *map(str, more)]


def adapter_of(run):
    return (Path(run) / "model" / "adapter_model.safetensors").read_bytes()


@pytest.mark.slow
def test_adapters_are_the_runs_of_their_seeds_and_more_of_them_keep_those_that_ended(place, capsys):
    assert main(words("--adapters", 2, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["seeds"]) == {"0", "1"}
    assert found["summary"]["reward"]["seeds"] == 2
    written = Path("runs/a/seed-0/metrics.jsonl").stat().st_mtime_ns
    # the same as `--seeds 3`, side by side; each run knows how it is repeated alone
    assert main(words("--seeds", 3, "--share-base", "--json")) == 0
    assert set(json.loads(capsys.readouterr().out)["seeds"]) == {"0", "1", "2"}
    assert Path("runs/a/seed-0/metrics.jsonl").stat().st_mtime_ns == written
    assert main(["train", "--from-run", "runs/a/seed-1", "--output-dir", "runs/alone"]) == 0
    assert adapter_of("runs/alone") == adapter_of("runs/a/seed-1") != adapter_of("runs/a/seed-0")
    recorded = json.loads(Path("runs/a/seed-1/run.json").read_text())
    assert (recorded["config"]["seed"], recorded["state"]) == (1, "finished")


@pytest.mark.slow
def test_vary_trains_every_combination_and_a_failing_one_ends_alone(place, capsys):
    options = ("--vary", "learning_rate=1e-3,3e-3", "reward=mine.py:digits,mine.py:broken", "--json")
    assert main(words(*options)) == 3  # RewardError
    captured = capsys.readouterr()
    found = json.loads(captured.out)["runs"]
    assert set(found) == {"learning_rate=0.001,reward=mine.py-digits", "learning_rate=0.003,reward=mine.py-digits"}
    assert "reward=mine.py-broken failed" in captured.err
    assert "the judge is gone" in next(Path("runs/a").glob("*broken.log")).read_text()
    for name, result in found.items():
        recorded = json.loads((Path(result["run"]) / "run.json").read_text())
        assert f"learning_rate={recorded['config']['learning_rate']:g}" in name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--adapters", "0"], "--adapters 0 must be at least 1"),
        (["--adapters", "2", "--seeds", "2"], "keep one of them"),
        (["--share-base"], "--seeds N"),
        (["--vary", "model=a,b"], "one base"),
        (["--vary", "dataset=a,b"], "one data set"),
        (["--vary", "max_prompts=1,2"], "one data set"),
        (["--vary", "reward=a/mine.py:f,b/mine.py:f"], "two runs the name"),
        (["--vary", "learnin_rate=1,2"], "Did you mean"),
        (["--vary", "learning_rate=fast,slow"], "cannot be read as"),
        (["--vary", "num_generations=2,3"], "num_generations=3"),
        (["--adapters", "2", "--report-to", "none", "--streaming"], "leave --streaming out"),
    ],
)
def test_flags_that_make_no_runs_are_refused_before_any_work(options, said, place, capsys):
    assert main(words(*options)) == 2
    assert said in capsys.readouterr().err
    assert not Path("runs/a").exists()


def test_without_an_adapter_there_is_nothing_to_share(place, capsys):
    without = [word for word in WHAT.split() if word not in ("--lora-r", "2")]
    assert main(["train", *without, *SMALL.split(), "--adapters", "2"]) == 2
    assert "give --lora-r" in capsys.readouterr().err
