"""`covey train` on a real small model: it trains, evaluates, saves, goes on where it stopped, and the run can be talked to."""

import json
import shutil
import signal
import time

import pytest

from covey.cli import main
from forked import Forked
from kit import tiny_model, tiny_tokenizer

REWARD = "def digits(completions, **kwargs):\n    return [sum(c.isdigit() for c in text) / 8 for text in completions]\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model(layers=1).save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    for name, count in (("train", 6), ("test", 3)):
        rows = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(REWARD)
    return tmp_path


def words(*more):
    given = (
        "train --model model --dataset train.jsonl --prompt-column question --reward mine.py:digits --output-dir run"
    )
    small = (
        "--max-completion-length 6 --num-generations 4 --per-device-train-batch-size 8 --learning-rate 1e-3 --use-cpu"
    )
    return [*given.split(), *small.split(), "--disable-tqdm", "--logging-steps", "1", *map(str, more)]


def test_a_run_trains_evaluates_and_can_be_talked_to(place, capsys):
    assert main(words("--max-steps", 2, "--eval-dataset", "test.jsonl", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"] == "run"
    assert found["steps"] == 2
    assert 0 <= found["metrics"]["reward"] <= 1
    assert "eval_reward" in found["metrics"]
    assert (place / "run" / "model" / "config.json").is_file()
    assert (place / "run" / "run.json").is_file()
    assert main(["chat", "run", "--prompt", "What is 1 + 1?", "--max-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "What is 1 + 1?"


def test_the_same_command_goes_on_from_the_newest_checkpoint(place, capsys):
    assert main(words("--max-steps", 3, "--save-steps", 2)) == 0
    assert main(words("--max-steps", 3, "--save-steps", 2, "--resume", "auto", "--json")) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["steps"] == 3


def test_a_folder_that_holds_another_run_is_refused(place, capsys):
    assert main(words("--max-steps", 1)) == 0
    assert main(words("--max-steps", 1)) == 2
    assert "run" in capsys.readouterr().err


def test_an_adapter_is_trained_and_talked_to(place, capsys):
    pytest.importorskip("peft")
    assert main(words("--max-steps", 1, "--lora-r", 4)) == 0
    assert (place / "run" / "model" / "adapter_config.json").is_file()
    capsys.readouterr()
    assert main(["chat", "run", "--prompt", "Hi", "--max-tokens", "2", "--json"]) == 0


def test_an_interrupt_saves_and_says_how_to_go_on(place):
    code = "import sys; from covey.cli import main; sys.exit(main(sys.argv[1:]))"
    with Forked("-c", code, *words("--max-steps", 100_000)) as process:
        metrics = place / "run" / "metrics.jsonl"
        for _ in range(600):
            if process.poll() is not None or (metrics.is_file() and metrics.read_text().count("\n") >= 2):
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    assert process.returncode == 130
    assert process.out == ""
    (line,) = (line for line in process.err.splitlines() if "go on with: covey train --model model" in line)
    assert line.endswith("--resume auto")
    assert any((place / "run").glob("checkpoint-*"))


@pytest.mark.filterwarnings("default")
def test_resume_auto_starts_again_a_run_that_died_before_its_first_checkpoint(place, capsys):
    assert main(words("--max-steps", 1)) == 0
    for path in (place / "run").glob("checkpoint-*"):
        shutil.rmtree(path)
    assert main(words("--max-steps", 1)) == 2  # without saying so, nothing is touched
    assert main(words("--max-steps", 1, "--resume", "auto")) == 0
    assert "it is now in run/previous-1, and a new one starts" in capsys.readouterr().err
    assert any((place / "run").glob("checkpoint-*"))
    assert (place / "run" / "previous-1" / "run.json").is_file()
