"""Runs on live sources: killed and resumed they are the run that was never interrupted, and a source hears only of saved rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from covey.cli import main
from covey.data import follow
from covey.errors import DataError
from faults.small_runs import ROWS, trainer, weights


class Queue:
    """A source that remembers what it was told."""

    def __init__(self) -> None:
        self.committed: list[int] = []

    def poll(self, after: int | None, limit: int) -> list[tuple[int, Mapping[str, Any]]]:
        start = after or 0
        return [(n + 1, {"prompt": f"Ben has {n} pens.", "answer": "1"}) for n in range(start, start + limit)]

    def commit(self, position: int) -> None:
        self.committed.append(position)


def test_a_resumed_run_ends_with_the_weights_of_one_that_was_never_stopped(tmp_path: Path):
    options = {"curriculum": "replay:0.25", "lr_scheduler_type": "constant"}
    whole = trainer(tmp_path / "whole", train_dataset=follow(Queue()), max_steps=6, save_steps=6, **options)
    whole.train()
    trainer(tmp_path / "parts", train_dataset=follow(Queue()), max_steps=3, save_steps=3, **options).train()
    rest = trainer(tmp_path / "parts", train_dataset=follow(Queue()), max_steps=6, save_steps=3, **options)
    rest.train(resume_from_checkpoint=True)
    assert torch.equal(weights(whole), weights(rest))


def test_a_source_hears_of_rows_once_their_checkpoint_is_written(tmp_path: Path):
    saved, unsaved = Queue(), Queue()
    trainer(tmp_path / "saved", train_dataset=follow(saved), max_steps=4, save_steps=2).train()
    trainer(tmp_path / "unsaved", train_dataset=follow(unsaved), max_steps=4, save_strategy="no").train()
    assert saved.committed == [4, 8]  # two prompts a step
    assert unsaved.committed == []


def test_a_silent_source_ends_the_run_with_a_checkpoint_to_go_on_from(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:4]))
    options = {"max_steps": 4, "save_steps": 100, "live_timeout_seconds": 0.3}
    with pytest.raises(DataError, match="No prompt came"):
        trainer(tmp_path / "run", train_dataset=follow(path), **options).train()
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS[4:])
    rest = trainer(tmp_path / "run", train_dataset=follow(path), **options)
    assert rest.train(resume_from_checkpoint=True).global_step == 4
    assert rest.started_at == 2


def test_what_is_measured_on_is_never_trained_on(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    seen: list[str] = []

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        seen.extend(prompts)
        return [float(len(one)) for one in completions]

    held_out = Dataset.from_list(ROWS[:4])
    trainer(
        tmp_path / "run", train_dataset=follow(path), eval_dataset=held_out, reward_funcs=reward, max_steps=4
    ).train()
    assert set(seen) == {row["prompt"] for row in ROWS[4:]}


@pytest.mark.slow
def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "prompts.jsonl"
    problem = {"prompt": "Tom has 3 pens and Ada has 4 pens. How many pens do they have together?", "answer": "7"}
    path.write_text("".join(json.dumps({**problem, "id": n}) + "\n" for n in range(4)))
    words = [
        "train",
        "--model",
        "demo",
        "--dataset",
        f"follow:{path}",
        "--reward",
        "demo",
        "--output-dir",
        str(tmp_path / "run"),
    ]
    sizes = [
        "--per-device-train-batch-size",
        "8",
        "--num-generations",
        "4",
        "--max-completion-length",
        "8",
        "--use-cpu",
        "true",
    ]
    assert main([*words, *sizes, "--max-steps", "2"]) == 0
    assert "a stream" in capsys.readouterr().err
    assert main([*words[:-1], str(tmp_path / "other"), *sizes]) == 2
    assert "set max_steps" in capsys.readouterr().err
