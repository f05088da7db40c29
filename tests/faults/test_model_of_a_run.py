"""The weights that a run's folder stands for: those that it ended with, and those of its newest checkpoint while it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import trainer
from transformers import TrainerCallback

from covey.runs.weights import model_folder
from kit import rest_nightly


class Cut(TrainerCallback):
    """Ends a run after a step, as a crash would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.step:
            raise ZeroDivisionError("the machine is gone")


def cut(folder: Path, resume: bool, step: int) -> None:
    with pytest.raises(ZeroDivisionError):
        trainer(folder, max_steps=9, callbacks=[Cut(step)]).train(resume_from_checkpoint=resume)


@pytest.mark.parametrize("place", rest_nightly(["model", ""], 1))
def test_a_run_that_has_gone_on_is_its_newest_checkpoint_and_not_the_model_of_before(
    tmp_path: Path, place: str
) -> None:
    run, model = tmp_path / "run", str(tmp_path / "run" / place)
    one = trainer(run, max_steps=2)
    one.train()
    one.save_model(model)
    assert model_folder(str(run)) == model
    cut(run, True, 5)
    assert model_folder(str(run)) == str(run / "checkpoint-4")
    one = trainer(run, max_steps=6)
    one.train(resume_from_checkpoint=True)
    one.save_model(model)
    assert model_folder(str(run)) == model
    with pytest.warns(UserWarning, match="held a run already"):
        cut(run, False, 4)  # another run in the same folder
    assert model_folder(str(run)) == str(run / "checkpoint-3")
