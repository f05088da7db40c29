"""From every step of a run, wherever in its rollouts it stands, a resume ends as the run left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from resume_cases import Case, differences, train

STEPS = 8


@pytest.mark.parametrize(
    "steps_per_generation, num_iterations",
    [
        pytest.param(2, 2, marks=pytest.mark.slow),
        *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in [(1, 1), (1, 2), (2, 1), (4, 1), (4, 2)]),
    ],
)
def test_a_run_resumed_from_any_step_ends_as_the_one_left_alone(
    steps_per_generation: int, num_iterations: int, tmp_path: Path
) -> None:
    options = {"num_iterations": num_iterations, "steps_per_generation": steps_per_generation, "max_steps": STEPS}
    case = Case("everywhere", {**options, "max_completion_length": 3, "gradient_accumulation_steps": 1})
    train(case, tmp_path / "whole")
    for step in range(1, STEPS):
        train(case, tmp_path / f"from-{step}", tmp_path / "whole" / f"checkpoint-{step}")
        assert differences(case, tmp_path / "whole", tmp_path / f"from-{step}") == {}, f"from step {step}"
