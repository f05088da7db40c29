"""`covey train --from-run`: a run can be repeated from its folder alone, and says what stands in the way."""

import json
import os
import select
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from covey.cli import main
from kit import rest_nightly, tiny_model, tiny_tokenizer

REWARD = "def digits(completions, **kwargs):\n    return [sum(c.isdigit() for c in text) / 8 for text in completions]\n"
SMALL = {
    "max_completion_length": 6,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-3,
    "max_steps": 3,
    "use_cpu": True,
    "disable_tqdm": True,
    "logging_steps": 1,
}


def prepare():
    """A model, data, a reward and a configuration in the working folder."""
    tiny_model(layers=1).save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    rows = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(6)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("mine.py").write_text(REWARD)
    what = {"model": "model", "dataset": "sums.jsonl", "prompt_column": "question", "reward": ["mine.py:digits"]}
    Path("run.yaml").write_text(yaml.safe_dump({**what, **SMALL, "beta": 0.01, "seed": 3}))


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of `prepare` in which runs/a has trained for three steps; no test changes what is in it."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        prepare()
        assert main(["train", "run.yaml", "--output-dir", "runs/a"]) == 0
    return folder


@pytest.fixture
def shared(trained, monkeypatch):
    monkeypatch.chdir(trained)
    return trained


@pytest.fixture
def copied(trained, tmp_path, monkeypatch):
    """A copy of it, to be changed."""
    others = shutil.ignore_patterns("b", "seed-4", "elsewhere")
    shutil.copytree(trained, tmp_path, ignore=others, dirs_exist_ok=True)
    facts = tmp_path / "runs" / "a" / "run.json"
    facts.write_text(facts.read_text().replace(str(trained), str(tmp_path)))
    monkeypatch.chdir(tmp_path)


def numbers(run):
    """What a run's steps computed, without times."""
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    timed = ("time", "seconds", "per_second", "memory")
    return [{k: v for k, v in line.items() if not any(word in k for word in timed)} for line in lines]


def test_a_repeated_run_has_the_same_numbers(shared, capsys):
    assert main(["train", "--from-run", "runs/a", "--output-dir", "runs/b"]) == 0
    first, second = numbers("runs/a"), numbers("runs/b")
    assert len(first) == 3
    assert first[0]["reward"] > 0
    assert first == second
    assert "repeats runs/a" in capsys.readouterr().err


def test_an_option_beside_it_changes_the_run_and_is_said(shared, capsys):
    assert (
        main(["train", "--from-run", "runs/a", "--output-dir", "runs/seed-4", "--seed", "4", "--max-steps", "1"]) == 0
    )
    assert "repeats runs/a with seed 3 -> 4, max_steps 3 -> 1" in capsys.readouterr().err
    assert len(numbers("runs/seed-4")) == 1
    assert numbers("runs/seed-4")[0] != numbers("runs/a")[0]
    again = yaml.safe_load(Path("runs/seed-4/train.yaml").read_text())
    assert (again["seed"], again["beta"], again["model"]) == (4, 0.01, "model")


@pytest.mark.nightly
def test_it_works_from_another_folder(shared, monkeypatch):
    (shared / "elsewhere").mkdir()
    monkeypatch.chdir(shared / "elsewhere")
    assert main(["train", "--from-run", "../runs/a", "--output-dir", "b"]) == 0
    assert numbers("b") == numbers("../runs/a")


AGAIN = ["train", "--from-run", "runs/a", "--output-dir", "runs/b", "--max-steps", "1"]


@pytest.fixture
def changed(copied):
    """A run whose reward file has changed since: it now leaves a trace as soon as it is imported."""
    for name in [
        name for name, module in sys.modules.items() if str(getattr(module, "__file__", "")).endswith("/mine.py")
    ]:
        del sys.modules[name]
    Path("mine.py").write_text("open('trace', 'w').close()\n" + REWARD.replace("/ 8", "/ 4"))


def test_a_changed_reward_is_refused_before_it_is_imported_where_nobody_can_be_asked(changed, capsys):
    assert main(AGAIN) == 2
    said = capsys.readouterr().err
    assert "mine.py has changed since. Look at it; --trust-source runs it as it is now." in said
    assert not Path("trace").exists()
    assert main([*AGAIN, "--trust-source"]) == 0
    assert "mine.py has changed since; it is run, and numbers may differ" in capsys.readouterr().err
    assert Path("trace").exists()
    assert "trust_source" not in Path("runs/b/train.yaml").read_text(), "it holds for one call"


@pytest.mark.parametrize(("answer", "code"), rest_nightly([("\n", 2), ("y\n", 0), ("no\n", 2)], 1))
def test_at_a_terminal_it_is_asked_once(changed, monkeypatch, answer, code):
    ours, theirs = os.openpty()
    os.write(ours, answer.encode())
    with open(theirs, closefd=False) as keyboard, open(theirs, "w", closefd=False) as screen:
        monkeypatch.setattr(sys, "stdin", keyboard)
        monkeypatch.setattr(sys, "stderr", screen)
        assert main(AGAIN) == code
        screen.flush()
    said = ""
    while select.select([ours], [], [], 2.0)[0] and "[y/N]" not in said:  # it arrives in pieces
        said += os.read(ours, 100_000).decode()
    while select.select([ours], [], [], 0.1)[0]:
        said += os.read(ours, 100_000).decode()
    os.close(ours)
    os.close(theirs)
    assert said.count("Run this code? [y/N]") == 1
    assert Path("trace").exists() == (code == 0)


@pytest.mark.nightly
def test_a_reward_that_is_named_beside_it_is_the_users_own(changed, capsys):
    assert main([*AGAIN, "--reward", "mine.py:digits"]) == 0


def test_code_within_the_run_folder_and_code_beside_a_model_are_asked_for_too(copied, capsys):
    recipe = yaml.safe_load(Path("runs/a/train.yaml").read_text())
    Path("runs/a/mine.py").write_text(Path("mine.py").read_text())
    Path("runs/a/train.yaml").write_text(yaml.safe_dump({**recipe, "reward": ["runs/a/mine.py:digits"]}))
    assert main(AGAIN) == 2
    assert "lies in the run's own folder" in capsys.readouterr().err
    Path("runs/a/train.yaml").write_text(yaml.safe_dump({**recipe, "trust_remote_code": True}))
    assert main(AGAIN) == 2
    assert "its options run the code beside the model (trust_remote_code)" in capsys.readouterr().err
    Path("other.py").write_text(REWARD + "# another\n")
    Path("runs/a/train.yaml").write_text(yaml.safe_dump({**recipe, "reward": ["other.py:digits"]}))
    assert main(AGAIN) == 2
    assert "run.json does not hold the text of" in capsys.readouterr().err


def test_trust_in_the_source_needs_a_run_to_repeat(place, capsys):
    assert main(["train", "run.yaml", "--trust-source"]) == 2
    assert "--trust-source belongs to --from-run" in capsys.readouterr().err


@pytest.mark.nightly
def test_other_versions_are_warned_of(copied, capsys):
    found = json.loads(Path("runs/a/run.json").read_text())
    found["versions"]["torch"] = "1.0"
    Path("runs/a/run.json").write_text(json.dumps(found))
    assert main(AGAIN) == 0
    assert "torch was 1.0 and is" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(place, capsys):
    assert main(["train", "--from-run", "."]) == 2
    assert "holds no run.json of a run" in capsys.readouterr().err


def test_repeating_and_going_on_exclude_each_other(place, capsys):
    assert main(["train", "--from-run", "runs/a", "--resume", "auto"]) == 2
    assert "keep one of them" in capsys.readouterr().err


def script(algorithm=None, reward=None):
    rows = Dataset.from_list([{"prompt": f"What is {i} + {i}?"} for i in range(6)])
    args = GRPOConfig(output_dir="runs/s", report_to="none", **{**SMALL, "max_steps": 1})
    from covey.rewards import resolve

    rewards = reward or resolve("mine.py:digits").call
    GRPOTrainer(model="model", reward_funcs=rewards, args=args, train_dataset=rows, algorithm=algorithm).train()


@pytest.mark.slow
def test_a_run_that_a_script_started_asks_for_its_data_only(place, capsys):
    script()
    assert main(["train", "--from-run", "runs/s", "--output-dir", "runs/b"]) == 2
    assert "--dataset is missing" in capsys.readouterr().err
    more = ["--dataset", "sums.jsonl", "--prompt-column", "question", "--output-dir", "runs/b"]
    assert main(["train", "--from-run", "runs/s", *more]) == 0
    assert numbers("runs/b") == numbers("runs/s")


def test_a_reward_that_cannot_be_imported_is_asked_for(place, capsys):
    script(reward=lambda completions: [float(len(text)) for text in completions])
    assert main(["train", "--from-run", "runs/s", "--dataset", "sums.jsonl", "--prompt-column", "question"]) == 2
    assert "--reward is missing" in capsys.readouterr().err


def test_an_algorithm_that_its_options_do_not_make_is_refused(place, capsys):
    script(algorithm=alg.grpo().replace(advantage=alg.dr_grpo().advantage))
    more = ["--dataset", "sums.jsonl", "--prompt-column", "question", "--output-dir", "runs/b"]
    assert main(["train", "--from-run", "runs/s", *more]) == 2
    assert "give it as --algorithm" in capsys.readouterr().err
