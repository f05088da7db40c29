"""`covey why`: a recorded step is made again exactly, planted causes are named first, healthy steps blame nothing."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import planted
import pytest

from covey.cli import main


def asked(capsys, run: Path, step: int) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["why", str(run), "--step", str(step), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.nightly) for s in range(2, 11))])
@pytest.mark.parametrize("kind", planted.PLANTED)
@pytest.mark.slow
def test_a_planted_cause_is_named_first(kind: str, seed: int, tmp_path: Path, capsys) -> None:
    step = planted.PLANTED[kind](tmp_path / "run", seed)
    found = asked(capsys, tmp_path / "run", step)
    assert found["troubles"]
    assert found["changes"][0]["kind"] == kind, found
    assert found["changes"][0]["named"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.nightly) for s in range(2, 11))])
def test_a_healthy_step_is_made_again_exactly_and_blames_nothing(seed: int, tmp_path: Path, capsys) -> None:
    step = planted.healthy(tmp_path / "run", seed)
    found = asked(capsys, tmp_path / "run", step)
    assert math.isclose(found["grad_norm"]["replayed"], found["grad_norm"]["recorded"], rel_tol=1e-5)
    assert found["troubles"] == []
    shutil.rmtree(tmp_path / "run" / f"checkpoint-{step - 1}")
    assert main(["why", str(tmp_path / "run"), "--step", str(step)]) == 2
    assert f"lacks checkpoint-{step - 1}" in (said := capsys.readouterr().err)
    assert "It has both for step 2" in said


def test_what_is_missing_is_told_in_a_sentence(tmp_path: Path, capsys) -> None:
    for words, said in (
        (["--step", "3"], "needs a run and a step"),
        ([str(tmp_path)], "needs a run and a step"),
        ([str(tmp_path), "--step", "3"], "holds no run.json"),
    ):
        assert main(["why", *words]) == 2
        assert said in capsys.readouterr().err
