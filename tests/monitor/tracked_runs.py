"""Runs that are sent to a tracker, in this process or in one of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

import forked
from covey.monitor.trackers import Trackers
from covey.types import Alert
from faults.small_runs import trainer

ALERT = Alert(
    rule="dead_groups", severity="warning", said="Dead.", step=2, evidence={"tied": 1.0}, try_this=("easier",)
)
RUN = {"logging_steps": 1, "save_steps": 2, "max_completion_length": 3, "log_completions": True}


def part(folder: Path, tracker: str, steps: int, **changed: Any) -> Any:
    """Train up to `steps`, from step 2 on when there are more."""
    one = trainer(folder, report_to=tracker, max_steps=steps, lr_scheduler_type="constant", **RUN, **changed)
    one.add_callback(_Alarm(one.trackers))
    one.train(resume_from_checkpoint=True if steps > 2 else None)
    return one


def elsewhere(folder: Path, tracker: str, steps: int) -> None:
    """`part` in a process of its own."""
    here = Path(__file__).parent
    places = [str(path) for path in (here.parent, here, here.parent / "faults")]
    script = f"""
import pathlib, sys
sys.path[:0] = {places}
import tracked_runs
tracked_runs.part(pathlib.Path({str(folder)!r}), {tracker!r}, {steps})
"""
    done = forked.run("-c", script)
    assert done.returncode == 0, done.err


class _Alarm(TrainerCallback):
    def __init__(self, tell: Trackers) -> None:
        self.tell = tell

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.tell(ALERT)
