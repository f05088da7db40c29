"""A run goes on with another number of processes: the same prompts and gradients up to rounding, and it says that it is not exact."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_cases import ALONE, TOGETHER, Case, train
from safetensors.torch import load_file

pytestmark = pytest.mark.timeout(900)  # processes of their own on a machine that others load


def step_4(run: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return lines[-1], load_file(run / "checkpoint-4" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [pytest.param(TOGETHER, ALONE, id="2 -> 1"), pytest.param(ALONE, TOGETHER, id="1 -> 2", marks=pytest.mark.nightly)],
)
def test_another_number_of_processes_takes_the_same_step_up_to_rounding(
    first: Case, then: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(first, tmp_path / "whole")
    with caplog.at_level(logging.WARNING, logger="covey.training.recording"):
        train(then, tmp_path / "resumed", tmp_path / "whole" / "checkpoint-3")
    (expected, weights), (found, others) = step_4(tmp_path / "whole"), step_4(tmp_path / "resumed")
    for name in ("step", "reward", "completions/mean_length", "num_tokens"):
        assert found[name] == expected[name], name
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
    assert all((weights[name] - others[name]).abs().max() < 1e-7 for name in weights)
    if then is ALONE:  # the other one's log is in its own processes
        assert "saved by 2 process(es) and goes on with 1" in caplog.text
        assert "not bit-exact" in caplog.text
