"""A stop signal in any phase of a run: a checkpoint that verifies, the documented exit code, and a resume that ends bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from covey.learner.learner import Learner
from covey.learner.reference import FrozenCopy
from covey.rollout.engine import NativeSampler
from covey.runs import checkpoint, checksums
from covey.training.saving import Saver
from faults.small_runs import reward_len, stopped, trainer, weights

OPTIONS: dict[str, Any] = {
    "max_steps": 4,
    "save_steps": 1,
    "beta": 0.05,
    "sync_ref_model": True,
    "ref_model_sync_steps": 100,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "per_device_eval_batch_size": 8,
}
PHASES: dict[str, tuple[Any, str]] = {
    "rollout": (NativeSampler, "sample"),
    "reference": (FrozenCopy, "measure"),
    "forward": (Learner, "_tokens"),
    "backward": (torch.Tensor, "backward"),
    "optimizer": (Learner, "_update"),
    "save": (Saver, "_work"),
}
CODES = {signal.SIGTERM: 75, signal.SIGINT: 130, signal.SIGUSR1: 75}


@contextmanager
def signalled(phase: str, number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[float]]]:
    """A real signal to this process at the second time that the phase begins; yields the reward to train with."""
    calls = [0]

    def strike() -> None:
        calls[0] += 1
        if calls[0] == 2:
            os.kill(os.getpid(), number)

    if phase in PHASES:
        owner, name = PHASES[phase]
        real = getattr(owner, name)

        def struck(*given: Any, **more: Any) -> Any:
            strike()
            return real(*given, **more)

        monkeypatch.setattr(owner, name, struck)

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        if phase == "reward":
            strike()
        return reward_len(prompts, completions)

    yield reward
    monkeypatch.undo()
    assert calls[0] >= 2, "the phase was reached"


def run_of(folder: Path, reward: Any = reward_len) -> Any:
    held_out = Dataset.from_list([{"prompt": f"{i}"} for i in range(2)])
    return trainer(folder, reward_funcs=reward, eval_dataset=held_out, **OPTIONS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    whole = run_of(tmp_path_factory.mktemp("whole") / "run")
    whole.train()
    return weights(whole)


@pytest.mark.parametrize(
    "phase, number",
    [
        pytest.param(
            phase,
            number,
            # SIGTERM in three phases, another signal in a fourth; the other pairs nightly
            marks=pytest.mark.slow
            if (phase, number) == ("optimizer", signal.SIGUSR1)
            or (phase in ("rollout", "save", "reward") and number == signal.SIGTERM)
            else pytest.mark.nightly,
            id=f"{phase}-{number.name}",
        )
        for phase in [*PHASES, "reward"]
        for number in CODES
    ],
)
def test_a_signal_in_any_phase_leaves_a_checkpoint_from_which_the_run_ends_bit_for_bit(
    phase: str, number: signal.Signals, undisturbed: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with signalled(phase, number, monkeypatch) as reward:
        one = run_of(tmp_path / "run", reward)
        stopped(one)
    assert one.exit_code == CODES[number]
    assert one.stopped_by == number.name
    assert one.state.global_step < OPTIONS["max_steps"]
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    assert checkpoint.step_of(newest) == one.state.global_step
    assert checksums.problems(newest) == []
    assert not [path for path in (tmp_path / "run").iterdir() if ".tmp-" in path.name]
    again = run_of(tmp_path / "run")
    again.train(resume_from_checkpoint="auto")
    assert torch.equal(weights(again), undisturbed)
