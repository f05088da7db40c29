"""A stop signal in the middle of a step is heard there; the checkpoint holds the last whole step, and nothing of this one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.learner.learner import Learner
from covey.rollout.engine import NativeSampler
from covey.rollout.hf import TransformersSampler
from covey.runs import checkpoint
from faults.small_runs import reward_len, stopped, trainer, weights
from kit import rest_nightly

STEPS = 4
OPTIONS: dict[str, Any] = {"max_steps": STEPS, "save_steps": 100, "beta": 0.05, "max_tokens_per_microbatch": 40}


class Watched:
    """What stands in the place of the real one: called, it counts; all else is the real one's."""

    def __init__(self, watch: SignalAt, owner: Any) -> None:
        self._watch, self._owner = watch, owner

    def __call__(self) -> None:
        self._watch.passed(self._owner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner.__dict__["_real_between"], name)


class SignalAt:
    """Stands where work can be left and sends this process a real signal at the n-th time it is passed."""

    def __init__(self, n: int, number: int = signal.SIGTERM) -> None:
        self.left, self.number, self.passed_after = n, number, 0

    def __get__(self, owner: Any, kind: type) -> Any:
        return Watched(self, owner)

    def __set__(self, owner: Any, value: Any) -> None:
        owner.__dict__["_real_between"] = value

    def passed(self, owner: Any) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)
        if self.left < 0:
            self.passed_after += 1
        owner.__dict__.get("_real_between", lambda: None)()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    whole = trainer(tmp_path_factory.mktemp("whole") / "run", **OPTIONS)
    whole.train()
    return weights(whole)


@pytest.mark.parametrize(
    "where, n",
    rest_nightly(
        [*[(NativeSampler, n) for n in (9, 1, 14)], *[(Learner, n) for n in (3, 1, 4, 11)]],
        [(NativeSampler, 9), (Learner, 3)],
    ),
)
def test_a_signal_is_heard_between_tokens_and_micro_batches(
    where: type, n: int, undisturbed: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = SignalAt(n)
    monkeypatch.setattr(where, "interruption" if where is Learner else "check_stop", watch, raising=False)
    run = trainer(tmp_path / "run", **OPTIONS)
    stopped(run)
    assert run.stopped_by == "SIGTERM"
    assert run.exit_code == 75
    assert watch.passed_after == 0  # nothing more was begun
    assert run.state.global_step < STEPS
    (saved,) = checkpoint.checkpoints(tmp_path / "run")
    assert checkpoint.step_of(saved) == run.state.global_step
    monkeypatch.undo()
    again = trainer(tmp_path / "run", **OPTIONS)
    again.train(resume_from_checkpoint=True)
    assert bool((weights(again) == undisturbed).all())


def test_the_transformers_sampler_hears_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = SignalAt(9, signal.SIGINT)  # after the five tokens that are compared with a plain forward
    monkeypatch.setattr(TransformersSampler, "check_stop", watch, raising=False)
    run = trainer(tmp_path / "run", rollout_backend="transformers", **OPTIONS)
    stopped(run)
    assert (run.stopped_by, run.exit_code, watch.passed_after) == ("SIGINT", 130, 0)


def test_an_evaluation_is_finished_before_the_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its result belongs to a step that is done; half of it would be lost."""
    seen: list[int] = []

    def watched(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        seen.append(len(completions))
        if len(seen) == 2:  # the first call was the rollout's
            os.kill(os.getpid(), signal.SIGTERM)
        return reward_len(completions, completions)

    rows = [{"prompt": f"{i}"} for i in range(6)]
    from datasets import Dataset

    run = trainer(tmp_path / "run", reward_funcs=watched, eval_dataset=Dataset.from_list(rows), eval_strategy="steps", eval_steps=1,
                  per_device_eval_batch_size=8, **OPTIONS)  # fmt: skip
    stopped(run)
    assert run.exit_code == 75
    assert run.state.global_step == 1
    assert any("eval_reward" in entry for entry in run.state.log_history)
