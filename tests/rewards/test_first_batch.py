"""A reward that fails on every completion of the first batch ends the run, with the exception, its line and where to read on."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from covey.cli import main
from covey.errors import RewardError
from faults.small_runs import lines, trainer
from kit import rest_nightly, tiny_model, tiny_tokenizer

BROKEN = "def broken(completions, **columns):\n    return [float(c['score']) for c in completions]\n"


def broken(completions, **columns):
    return [float(c["score"]) for c in completions]  # THE LINE


LINE = next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith("# THE LINE"))


async def cancelled(completions):
    raise asyncio.CancelledError


def exits(completions):
    sys.exit(4)


def infinite(completions):
    return [float("inf") for _ in completions]


def test_the_run_ends_with_the_exception_its_line_and_the_path_of_the_events(tmp_path):
    with pytest.raises(RewardError) as error:
        trainer(tmp_path / "run", reward_funcs=broken, max_steps=4).train()
    said = str(error.value)
    assert "'broken' failed on every completion of the first batch, with TypeError: string indices" in said
    assert f"test_first_batch.py:{LINE}" in said
    assert str(tmp_path / "run" / "events.jsonl") in said
    assert "\n" not in said
    events = lines(tmp_path / "run", "events.jsonl")
    assert all(event["kind"] == "reward_error" for event in events)
    assert f"line {LINE}, in" in events[0]["details"]["traceback"]


@pytest.mark.parametrize("function", rest_nightly([cancelled, exits, infinite], [exits, infinite]))
def test_whatever_it_fails_with(function, tmp_path):
    with pytest.raises(RewardError, match=f"'{function.__name__}' failed on every completion of the first batch"):
        trainer(tmp_path / "run", reward_funcs=[function, broken_later()], max_steps=2).train()


def test_a_time_limit_too(tmp_path):
    def slow(completions):
        time.sleep(60)

    with pytest.raises(
        RewardError,
        match="'slow' failed on every completion of the first batch, with DeadlineError.*; raise reward_timeout_seconds",
    ):
        trainer(tmp_path / "run", reward_funcs=slow, max_steps=2, reward_timeout_seconds=0.2).train()


def broken_later():
    """Good in the first batch, never again."""
    calls = []

    def later(completions):
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("gone")
        return [float(len(c)) for c in completions]

    return later


def test_one_that_fails_later_is_recorded_and_the_run_goes_on(tmp_path):
    state = trainer(tmp_path / "run", reward_funcs=broken_later(), max_steps=3).train()
    assert state.global_step == 3
    assert lines(tmp_path / "run", "events.jsonl")


@pytest.mark.parametrize("answer", rest_nightly([None, float("nan")], 1))
def test_one_that_has_nothing_to_say_is_no_failure(answer, tmp_path):
    silent = lambda completions: [answer for _ in completions]
    assert trainer(tmp_path / "run", reward_funcs=[silent, broken_later()], max_steps=2).train().global_step == 2


def test_one_that_scores_a_single_completion_is_no_failure(tmp_path):
    def picky(completions, completion_ids):
        if len(completions) > 1 or len(calls) > 0:
            raise ValueError("one at a time, and one only")
        calls.append(1)
        return [1.0]

    calls = []
    assert trainer(tmp_path / "run", reward_funcs=[picky, broken_later()], max_steps=2).train().global_step == 2


def test_the_command_line_ends_with_3_and_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny_model(layers=1).save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 1 ="}\n' * 6)
    (tmp_path / "mine.py").write_text(BROKEN)
    words = (
        "train --model model --dataset train.jsonl --reward mine.py:broken --output-dir run --max-completion-length 6 --max-steps 4 "
        "--num-generations 4 --per-device-train-batch-size 8 --use-cpu --disable-tqdm"
    )
    assert main(words.split()) == 3
    error = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error:"))
    assert "mine.py:2" in error
    assert "run/events.jsonl" in error
