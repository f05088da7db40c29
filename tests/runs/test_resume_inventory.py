"""Whatever a run remembers from step to step is in its checkpoint, or on a list with the reason why it need not be."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_cases import CASES, Case, trainer
from transformers import TrainerCallback

ALLOWED = {
    r"second|time|started|\.speed\.|\['(?:memory|weights)/": "clocks and memory, which say nothing of the machine that a run is resumed on",
    r"\.display\.": "what is on the screen",
    r"history\.series: names": "the series of clocks and memory are not kept; the others are compared one by one",
    r"\.sampler\.version": "given by the loop before it samples",
    r"\.micro_batcher\.largest": "the newest micro-batch, for a sentence about it",
    r"\.outputs\.": "what sampling leaves for the first update after it, before which no checkpoint is written",
    r"\.reference\.moves": "counts within one process, to know whether it moved between two looks",
    r"\.session\.num_steps": "counts with the clock beside it, which begins anew: the speed is that of this process",
    r"\.session\.last_saved": "a stop before the next step writes the same checkpoint again",
    r"\.metrics\._descriptor": "a number of this process, of the file that the next line opens",
    r"\.prompts\._order\._rows": "the rows of this epoch, drawn again from the seed when they are needed",
}
"""Places that may differ after a resume, and why."""


class Look(TrainerCallback):
    """What the run remembers when a step begins, by its number."""

    def __init__(self, one: Any) -> None:
        self.one, self.seen = one, {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen[state.global_step] = memory_of(self.one._running)


def memory_of(root: Any) -> dict[str, str]:
    """Every plain value that can be reached through Covey's own objects and containers, by its place."""
    found: dict[str, str] = {}
    known: set[int] = set()

    def walk(value: Any, place: str) -> None:
        if isinstance(value, torch.Tensor):
            found[place] = hashlib.sha256(value.detach().float().cpu().numpy().tobytes()).hexdigest()
        elif value is None or isinstance(value, bool | int | float | str | bytes):
            found[place] = repr(value)
        elif id(value) not in known:
            known.add(id(value))
            if isinstance(value, Mapping):
                found[f"{place}: names"] = str(sorted(map(repr, value)))
                for key, item in value.items():
                    walk(item, f"{place}[{key!r}]")
            elif isinstance(value, list | tuple | deque):
                found[f"{place}: length"] = str(len(value))
                for i, item in enumerate(value):
                    walk(item, f"{place}[{i}]")
            elif type(value).__module__.startswith("covey."):
                for name, item in vars(value).items() if hasattr(value, "__dict__") else ():
                    walk(item, f"{place}.{name}")

    walk(root, "parts")
    return found


@pytest.mark.parametrize(
    "name",
    [
        "in the middle of num_iterations=3",
        pytest.param("a curriculum by what was learned", marks=pytest.mark.nightly),
        pytest.param("rewards with running statistics", marks=pytest.mark.slow),
        pytest.param("a reference that follows", marks=pytest.mark.nightly),
        pytest.param("algorithm: ppo", marks=pytest.mark.slow),
    ],
)
def test_what_changes_while_a_run_goes_on_is_the_same_after_a_resume(name: str, tmp_path: Path) -> None:
    options = {**CASES[name].options, "rollout_log_steps": 1}
    looks = []
    for folder, start in ((tmp_path / "whole", None), (tmp_path / "resumed", tmp_path / "whole" / "checkpoint-4")):
        one = trainer(Case(name, options), folder)
        looks.append(Look(one))
        one.add_callback(looks[-1])
        one.train(None if start is None else str(start))
    first, before, after = looks[0].seen[1], looks[0].seen[4], looks[1].seen[4]
    changing = {place for place in before if first.get(place) != before[place]}
    assert any("learner" in place for place in changing), "the walk sees what changes"
    assert any("monitor" in place for place in changing)
    lost = {
        place: (before[place][:80], after.get(place, "absent")[:80])
        for place in changing
        if after.get(place) != before[place]
    }
    series = r"history\.series\['(?!memory/|weights/)(.*?)'\]"
    assert all(place in after for place in before if (m := re.search(series, place)) and "second" not in m[1])
    lost = {place: values for place, values in lost.items() if not any(re.search(one, place) for one in ALLOWED)}
    assert lost == {}
