"""A stop signal in the middle of a step is heard there; the checkpoint holds the last whole step, and nothing of this one."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from covey.learner.learner import Learner
from covey.rollout.engine import NativeSampler
from covey.rollout.hf import TransformersSampler
from covey.runs import checkpoint
from faults.small_runs import lines, reward_len, stopped, trainer, weights
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
    watch = SignalAt(19, signal.SIGINT)  # after the tokens of the trials: five compared, ten timed
    monkeypatch.setattr(TransformersSampler, "check_stop", watch, raising=False)
    run = trainer(tmp_path / "run", rollout_backend="transformers", **OPTIONS)
    stopped(run)
    assert (run.stopped_by, run.exit_code, watch.passed_after) == ("SIGINT", 130, 0)


@pytest.mark.parametrize("kind, n", [(NativeSampler, 2), (TransformersSampler, 2), (TransformersSampler, 8)])
def test_a_signal_is_heard_between_the_tokens_of_a_trial(
    kind: type, n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that are compared with a plain forward, and the sixth to fifteenth of the fallback, which are timed."""
    watch = SignalAt(n)
    monkeypatch.setattr(kind, "check_stop", watch, raising=False)
    run = trainer(tmp_path / "run", rollout_backend="auto" if kind is NativeSampler else "transformers", **OPTIONS)
    stopped(run)
    assert (run.stopped_by, run.exit_code, run.state.global_step) == ("SIGTERM", 75, 0)
    assert watch.passed_after <= 1  # the timing of the fallback is left at its first token


EVALUATED: dict[str, Any] = {
    **OPTIONS,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_steps": 1,
    "metric_for_best_model": "reward",
    "greater_is_better": True,
    "per_device_eval_batch_size": 8,
}


def evaluated_run(folder: Path, reward: Any = reward_len) -> Any:
    """A run that evaluates and saves after every step."""
    rows = Dataset.from_list([{"prompt": f"{i}"} for i in range(6)])
    return trainer(folder, reward_funcs=reward, eval_dataset=rows, **EVALUATED)


def evaluations(run: Any) -> list[dict[str, float]]:
    """Evaluations of the history without what a clock gives."""
    entries = [entry for entry in run.state.log_history if "eval_reward" in entry]
    clocks = ("runtime", "per_second", "/seconds")
    return [{k: v for k, v in entry.items() if not any(clock in k for clock in clocks)} for entry in entries]


@pytest.mark.slow
def test_a_stop_is_heard_within_an_evaluation_which_a_resume_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluated_run(tmp_path / "whole")
    whole.train()
    watch = SignalAt(14)  # after the tokens that are compared with a plain forward, and the first rollout
    monkeypatch.setattr(NativeSampler, "check_stop", watch, raising=False)
    run = evaluated_run(tmp_path / "run")
    stopped(run)
    assert (run.exit_code, run.state.global_step, watch.passed_after) == (75, 1, 0)
    assert evaluations(run) == []
    assert "evaluation_left" in [event["kind"] for event in lines(tmp_path / "run", "events.jsonl")]
    monkeypatch.undo()
    again = evaluated_run(tmp_path / "run")
    again.train(resume_from_checkpoint=True)
    assert bool((weights(again) == weights(whole)).all())
    assert evaluations(again) == evaluations(whole)
    assert len(evaluations(whole)) == STEPS
    best, same = again.state.best_model_checkpoint, whole.state.best_model_checkpoint
    assert (Path(best).name, again.state.best_metric) == (Path(same).name, whole.state.best_metric)
    assert [line["step"] for line in lines(tmp_path / "run", "evaluations.jsonl")] == [1, 2, 3, 4]


@pytest.mark.nightly
def test_a_stop_within_the_evaluation_before_the_first_step_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = SignalAt(9)  # after the tokens that are compared with a plain forward
    monkeypatch.setattr(NativeSampler, "check_stop", watch, raising=False)
    rows = Dataset.from_list([{"prompt": f"{i}"} for i in range(6)])
    run = trainer(tmp_path / "run", eval_dataset=rows, eval_on_start=True, **EVALUATED)
    stopped(run)
    assert (run.exit_code, run.state.global_step, watch.passed_after) == (75, 0, 0)
    monkeypatch.undo()
    again = trainer(tmp_path / "run", eval_dataset=rows, eval_on_start=True, **EVALUATED)
    again.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in evaluations(again)] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_a_due_checkpoint_is_written_before_the_evaluation(tmp_path: Path) -> None:
    """A machine that is lost during a long evaluation costs no training; a resume from there evaluates first."""
    saved: list[list[str]] = []

    def look(prompts: list[str], completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        folders = checkpoint.checkpoints(tmp_path / "run")
        saved.append([folder.name for folder in folders])
        if len(saved) == 2:  # the second call scores the evaluation after the first step
            shutil.copytree(tmp_path / "run" / "checkpoint-1", tmp_path / "during")
        return reward_len(prompts, completions)

    look.__name__ = reward_len.__name__  # metrics carry it
    whole = trainer(tmp_path / "run", reward_funcs=look, eval_dataset=Dataset.from_list([{"prompt": "1"}]),
                    save_async=False, **EVALUATED)  # fmt: skip
    whole.train()
    assert saved[:2] == [[], ["checkpoint-1"]]
    state = checkpoint.load_state(tmp_path / "during")["state"]
    assert state["is_evaluation_due"]
    resumed = trainer(tmp_path / "other", eval_dataset=Dataset.from_list([{"prompt": "1"}]), **EVALUATED)
    resumed.train(resume_from_checkpoint=str(tmp_path / "during"))
    assert evaluations(resumed) == evaluations(whole)


def test_a_failed_call_of_an_abandoned_rollout_is_not_counted(tmp_path: Path) -> None:
    """It is made again after a resume; counted twice, such calls would end a run early."""

    def judge(prompts: list[str], completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        if trainer_state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)  # heard once the reference measures
            raise ConnectionError("nobody there")
        return reward_len(prompts, completions)

    run = trainer(tmp_path / "run", reward_funcs=judge, **OPTIONS)
    stopped(run)
    (saved,) = checkpoint.checkpoints(tmp_path / "run")
    assert checkpoint.step_of(saved) == 1
    assert checkpoint.load_state(saved)["scorer"]["in_a_row"] == {"judge": 0}
