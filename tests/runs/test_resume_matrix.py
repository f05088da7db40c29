"""Stopped in the middle and resumed is bit for bit the run left alone, whatever trains and however."""

from __future__ import annotations

from pathlib import Path

import pytest
from resume_cases import CASES, compare

from covey.checks import processor_has_bfloat16

QUICK = (
    "adapter: LoRA with dropout",
    "in the middle of num_iterations=3",
    "a reference that follows",
    "evaluation and early stopping",
)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
def test_a_run_resumed_in_the_middle_ends_as_the_one_left_alone(name: str, tmp_path: Path) -> None:
    if name == "bfloat16" and not processor_has_bfloat16():
        pytest.skip("this processor does not multiply bfloat16")
    assert compare(CASES[name], tmp_path) == {}
