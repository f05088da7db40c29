"""A run may be copied while it trains: the copy resumes, and plain transformers opens its checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_cases import Case, differences, trainer
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from covey.runs import checkpoint, checksums

CASE = Case("copied", {"max_steps": 5})
IDS = torch.arange(3, 20)[None]


class Copy(TrainerCallback):
    """Copies the folder at the start of every step, whatever is being written; as `cp -r` does, it takes what it finds."""

    def __init__(self, run: Path, place: Path) -> None:
        self.run, self.place = run, place

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        target = self.place / str(state.global_step)
        for file in [path for path in self.run.rglob("*") if path.is_file()]:
            to = target / file.relative_to(self.run)
            to.parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copy2(file, to)
            except FileNotFoundError:
                continue  # renamed meanwhile


@pytest.mark.slow
def test_every_copy_made_while_a_run_trained_resumes_and_ends_bit_for_bit(tmp_path: Path) -> None:
    run = tmp_path / "run"
    one = trainer(CASE, run)
    one.add_callback(Copy(run, tmp_path / "copies"))
    one.train()
    resumed = 0
    for step in (2, 4):
        copy = tmp_path / "copies" / str(step)
        damaged = [path.name for path in checkpoint.checkpoints(copy) if checksums.problems(path)]
        newest = next(path for path in reversed(checkpoint.checkpoints(copy)) if path.name not in damaged)
        assert checkpoint.step_of(newest) >= step - 2
        again = trainer(CASE, tmp_path / f"resumed-{step}")
        again.train(str(newest))
        assert differences(CASE, run, tmp_path / f"resumed-{step}") == {}
        resumed += 1
    assert resumed == 2


def test_plain_transformers_opens_a_checkpoint_and_answers_as_the_trained_model(tmp_path: Path) -> None:
    one = trainer(CASE, tmp_path / "run")
    one.train()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-5")
    with torch.no_grad():
        assert torch.equal(plain.eval()(IDS).logits, one.model.eval()(IDS).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "checkpoint-5")
    assert tokenizer("Tom has").input_ids == one.processing_class("Tom has").input_ids
