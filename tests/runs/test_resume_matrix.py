"""Stopped in the middle and resumed is bit for bit the run left alone, whatever trains and however."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from resume_cases import CASES, compare

from covey.config.checks import processor_has_bfloat16

QUICK = ("in the middle of num_iterations=3",)

HOLDS_STATE = (
    "evaluation and early stopping",
    "adapter: LoRA with dropout",
    "a reference that follows",
    "algorithm: ppo",
    "optimizer: adamw_8bit",
    "schedule: cosine",
    "in the middle of a rollout of 4 steps, used twice",
    "at the end of an epoch",
    "dropout",
    "streaming data",
    "a mixture of data sets",
    "dynamic sampling",
    "an adaptive KL coefficient",
    "an adaptive entropy coefficient",
    "the update guard's memory, roll-backs allowed",
    "a curriculum by what was learned",
    "rewards with running statistics",
    "averaged weights",
    "a teacher that is an average",
    "an ensemble, in the middle of a rollout of 4 steps",
)
"""One case for each thing that a checkpoint has to remember; all other cases run nightly. Two processes: `test_two_processes.py`."""
assert {*QUICK, *HOLDS_STATE} <= CASES.keys()


def tier(name: str) -> Any:
    if name in QUICK:
        return name
    return pytest.param(name, marks=pytest.mark.slow if name in HOLDS_STATE else pytest.mark.nightly)


@pytest.mark.parametrize("name", [tier(name) for name in CASES])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
def test_a_run_resumed_in_the_middle_ends_as_the_one_left_alone(name: str, tmp_path: Path) -> None:
    if name == "bfloat16" and not processor_has_bfloat16():
        pytest.skip("this processor does not multiply bfloat16")
    assert compare(CASES[name], tmp_path) == {}
