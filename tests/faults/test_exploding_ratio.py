"""A real ratio explodes: one update with a thousand times the learning rate, then the same rollout again, with nothing clipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import lines, trainer, weights
from transformers import TrainerCallback

from covey import algorithms as alg
from covey.errors import NumericsError
from kit import rest_nightly

AT = 25
"""The first update of a rollout; the second one, at the next step, meets the ratio."""


def unclipped(tokens: Any) -> torch.Tensor:
    return -tokens.ratio * tokens.advantages


class OneLargeUpdate(TrainerCallback):
    """Multiplies the learning rate of step `AT`, once; keeps the weights after each step."""

    def __init__(self, one: Any, factor: float) -> None:
        self.one, self.factor, self.left, self.seen = one, factor, [AT], dict[int, torch.Tensor]()

    def scale(self, factor: float) -> None:
        for group in self.one.optimizer.param_groups:
            group["lr"] *= factor

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.is_now = self.left == [state.global_step + 1]
        if self.is_now:
            self.left.clear()
            self.scale(self.factor)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.is_now:
            self.scale(1 / self.factor)
        self.seen[state.global_step] = weights(self.one)


def exploding(folder: Path, rung: str, factor: float = 1000.0, **changed: Any) -> tuple[Any, OneLargeUpdate]:
    given = {"num_iterations": 2, "max_steps": 30, "save_steps": 5, "learning_rate": 1e-3, "max_grad_norm": 0.0}
    rules = {"on_spike": rung, "bad_steps_limit": 1, "lr_scheduler_type": "constant"}
    one = trainer(folder, algorithm=alg.grpo().replace(objective=unclipped), **{**given, **rules, **changed})
    large = OneLargeUpdate(one, factor)
    one.add_callback(large)
    return one, large


def events(folder: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["kind"]) for line in lines(folder, "events.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("rung", rest_nightly(["log", "clip", "skip"], ["clip"]))
def test_it_is_seen_in_the_gradient_and_meets_the_rung_that_was_chosen(rung: str, tmp_path: Path) -> None:
    one, large = exploding(tmp_path / "run", rung)
    one.train()
    met = next(line for line in lines(tmp_path / "run") if line["step"] == AT + 1)
    assert met["approx_kl"] > 1, "it is the ratio: far from the policy that drew the completions"
    assert met["grad_norm"] > 1000
    first, *later = events(tmp_path / "run")
    assert first == (AT + 1, "spike_skipped" if rung == "skip" else "spike")
    assert rung != "skip" or not later, (
        "a policy that was let run into it may well spike again, one that was kept out may not"
    )
    assert torch.equal(large.seen[AT], large.seen[AT + 1]) == (rung == "skip")
    assert bool(weights(one).isfinite().all())
    assert one.state.global_step == 30


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*goes on from step")
def test_going_back_goes_further_where_the_newest_checkpoint_holds_the_cause(tmp_path: Path) -> None:
    one, _ = exploding(tmp_path / "run", "roll_back")
    one.train()
    assert events(tmp_path / "run") == [
        (26, "spike_skipped"), (25, "rolled_back"), (26, "spike_skipped"), (20, "rolled_back"),
    ]  # fmt: skip
    assert one.state.global_step == 30
    assert max(line["grad_norm"] for line in lines(tmp_path / "run")) < 10, "as if it had not been"


@pytest.mark.slow
def test_stop_stops_at_it(tmp_path: Path) -> None:
    one, _ = exploding(tmp_path / "run", "stop")
    with pytest.raises(NumericsError, match="step 26: grad_norm .* on_spike='stop' ends the run here") as caught:
        one.train()
    assert caught.value.exit_code == 70


@pytest.mark.nightly
def test_one_beyond_float32_is_a_bad_number_and_is_left_out(tmp_path: Path) -> None:
    one, large = exploding(tmp_path / "run", "log", factor=3000.0, bad_steps_limit=3)
    one.train()
    assert events(tmp_path / "run")[0] == (AT + 1, "non_finite_step")
    assert bool(weights(one).isfinite().all())
    assert torch.equal(large.seen[AT], large.seen[AT + 1])
    assert one.state.global_step == 30
