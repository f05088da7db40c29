"""What a run learned about memory is in its checkpoints: a resumed run does not run out of it again."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from resume_cases import Case, trainer
from transformers import TrainerCallback

from covey.learner.micro_batches import MicroBatcher
from covey.learner.out_of_memory import BatchLimits


def runs_out(limits: BatchLimits, times: int) -> None:
    """Memory that runs out `times` times in a row, on a micro-batch of 8 completions and 80 tokens."""
    left, room = [times], MicroBatcher(limits)

    def work() -> None:
        room.largest = (limits.max_rows, 10 * limits.max_rows)
        if left[0]:
            left[0] -= 1
            raise MemoryError("no room")

    room.attempt(work)


class RunsOut(TrainerCallback):
    def __init__(self, one: Any) -> None:
        self.one = one

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            parts = self.one._running
            runs_out(parts.learner.micro_batcher.limits, 2)
            parts.sampler._halve(n=4, rows=8, held=2**20, reason="no room")


def test_a_resumed_run_begins_with_the_sizes_that_were_found_to_fit(tmp_path: Path) -> None:
    case = Case("memory", {"max_steps": 2, "save_steps": 1})
    one = trainer(case, tmp_path / "one")
    one.add_callback(RunsOut(one))
    one.train()
    other = trainer(case, tmp_path / "other")
    assert other.train(str(tmp_path / "one" / "checkpoint-1")).global_step == 2
    room, sampler = other._running.learner.micro_batcher.limits, other._running.sampler
    assert (room.max_rows, room.max_tokens) == (2, 20)
    assert (sampler.max_rows, sampler.cache_bytes) == (4, 2**19)


def test_smaller_options_win_over_what_was_learned() -> None:
    room = BatchLimits(max_rows=1, max_tokens=100)
    room.load_state_dict({"max_rows": 4, "max_tokens": None})
    assert (room.max_rows, room.max_tokens) == (1, 100)


def test_larger_options_act_unless_memory_ran_out_which_is_said(caplog: Any) -> None:
    small = BatchLimits(max_rows=4, max_tokens=64, options=(64, 4))
    other = BatchLimits(max_rows=8, max_tokens=512, options=(512, 8))
    other.load_state_dict(small.state_dict())
    assert (other.max_rows, other.max_tokens) == (8, 512)
    assert not caplog.records
    runs_out(small, 1)
    caplog.clear()
    other.load_state_dict(small.state_dict())
    assert (other.max_rows, other.max_tokens) == (2, 20)
    assert "stay at most 2 completions and 20 tokens, whatever the options say now" in caplog.text
    again = BatchLimits(max_rows=2, max_tokens=20, options=(512, 8))
    again.load_state_dict(other.state_dict())
    assert again.is_learned


def test_the_last_resort_is_taken_again_at_once() -> None:
    taken: list[int] = []
    before = BatchLimits(max_rows=1, enable_recomputation=lambda: not taken.append(1))  # type: ignore[func-returns-value]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs_out(before, 1)
    after = BatchLimits(max_rows=1, enable_recomputation=lambda: not taken.append(2))  # type: ignore[func-returns-value]
    after.load_state_dict(before.state_dict())
    assert taken == [1, 2]
    assert after.is_last_resort
