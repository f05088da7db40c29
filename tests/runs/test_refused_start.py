"""A run that is refused as it starts leaves the run in its folder as it was: nothing is moved, and its `run.json` says how it ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset

from covey import GRPOTrainer
from covey.errors import ModelError
from faults.small_runs import options, reward_len, trainer
from kit import tiny_model, tiny_tokenizer

CHAT = Dataset.from_list([{"prompt": [{"role": "user", "content": "1 + 1"}]}] * 12)


def refused(folder: Path) -> GRPOTrainer:
    """A trainer whose prompts its tokenizer cannot render."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    args = options(folder, max_steps=3, save_steps=1)
    return GRPOTrainer(tiny_model("qwen2"), reward_len, args, CHAT, processing_class=tokenizer)


def contents(folder: Path) -> dict[str, bytes]:
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != ".lock"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.mark.parametrize("resume", [None, "checkpoint-1"])
def test_a_refused_run_moves_nothing(resume: str | None, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer(run, max_steps=2, save_steps=1).train()
    before = contents(run)
    with pytest.raises(ModelError, match="no chat template"):
        refused(run).train(resume_from_checkpoint=resume and str(run / resume))
    assert contents(run) == before
    trainer(run, max_steps=3, save_steps=1).train(resume_from_checkpoint=True)
    assert (run / "checkpoint-3").is_dir()
