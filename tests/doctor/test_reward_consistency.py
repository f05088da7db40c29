"""`covey reward audit`: a reward that disagrees with itself or with another verifier, and what that costs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from covey.cli import main
from covey.doctor.reward_audit.consistency import compare, recorded_groups, repeats_of
from covey.runs import rollouts
from kit import group, rest_nightly

TEXTS = [["4", "5", "4", "44"], ["7", "8", "9", "7"], ["1", "1", "1", "1"]]
ANSWERS = ["4", "7", "1"]


def groups():
    return [group(texts, columns={"answer": answer}) for texts, answer in zip(TEXTS, ANSWERS, strict=True)]


def run_with(tmp_path: Path) -> Path:
    """A run folder whose recorded reward pays each right answer, but for the first."""
    made = []
    for one, answer in zip(groups(), ANSWERS, strict=True):
        scores = torch.tensor([[float(done.text == answer)] for done in one.completions])
        made.append(replace(one, rewards=scores, advantages=scores[:, 0] - scores.mean()))
    made[0].rewards[0, 0] = 0.0
    rollouts.write(tmp_path / "run" / "rollouts", 1, made, ["exact"])
    return tmp_path / "run"


def test_a_reward_that_says_the_same_again_is_reliable_and_costs_nothing():
    scores = [np.array([[1.0, 0, 1, 0]] * 3), np.array([[1.0, 0, 0, 1]] * 3), np.ones((3, 4))]
    found = repeats_of("r", groups(), scores)
    assert (found.differ.value, found.reliability.value, found.cost, found.woken.value) == (0, 1, 1, 0)
    assert found.examples == ()


@pytest.mark.parametrize("noise, expected", rest_nightly([(0.5, 0.8), (1.0, 0.5), (2.0, 0.2)], [(1.0, 0.5)]))
def test_the_reliability_is_the_share_of_the_variance_that_repeats(noise, expected):
    rng = np.random.default_rng(3)
    scores = [rng.normal(size=(1, 8)) + noise * rng.normal(size=(3, 8)) for _ in range(2000)]
    found = repeats_of("r", [group(["x"] * 8)] * len(scores), scores)
    assert found.reliability.value == pytest.approx(expected, abs=0.02)
    assert found.reliability.low < expected < found.reliability.high
    assert found.cost == pytest.approx(1 / expected, rel=0.1)


def test_a_tied_group_that_noise_wakes_is_counted_and_a_completion_without_a_score_left_out():
    scores = [np.array([[1.0, 1, 1, math.nan], [1, 0, 1, 1]]), np.zeros((2, 4)), np.array([[1.0, 0, 1, 0]] * 2)]
    found = repeats_of("r", groups(), scores)
    assert found.woken.value == pytest.approx(1 / 3)
    assert found.unscored == 1
    assert found.examples == (("2 + 2 =", "5", (1.0, 0.0)),)


def test_false_verdicts_shrink_the_advantages_by_their_two_rates():
    rng = np.random.default_rng(5)
    truth = [(rng.random(16) < 0.5).astype(float) for _ in range(500)]
    mine = [np.where(rng.random(16) < np.where(one > 0, 0.1, 0.3), 1 - one, one) for one in truth]
    found = compare("r", "truth", [group(["x"] * 16)] * 500, mine, truth)
    assert found.paid_wrong.value == pytest.approx(0.3, abs=0.02)
    assert found.missed.value == pytest.approx(0.1, abs=0.02)
    assert found.retained == pytest.approx(0.6, abs=0.03)
    slope = np.polyfit(np.concatenate(truth), np.concatenate(mine), 1)[0]
    assert found.retained == pytest.approx(slope, abs=0.03), "the expected score rises by that much from wrong to right"


def test_a_run_is_asked_again_from_the_command_line(tmp_path, capsys):
    words = ["reward", "audit", str(run_with(tmp_path)), "--reward", "exact", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    (one,) = found["repeats"]
    assert (found["completions"], found["groups"]) == (12, 3)
    assert one["differ"]["value"] == pytest.approx(1 / 12), "the recorded score of one completion is another"
    assert one["examples"] == [["2 + 2 =", "4", [0.0, 1.0, 1.0]]]


def test_another_verifier_is_put_beside_it(tmp_path, capsys):
    own = tmp_path / "own.py"
    own.write_text("def begins(completions, answer): return [float(c[:1] == a) for c, a in zip(completions, answer)]\n")
    assert main(["reward", "audit", str(run_with(tmp_path)), "--reward", f"{own}:begins", "--against", "exact"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "OK begins the same scores again" in shown
    assert "WARN begins 8.3%" in shown
    assert "1 / 0: 2 + 2 = -> 44" in shown


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "holds no run.json"),
        (["--reward", "exact", "--steps", "7:"], "has no rollouts of these steps"),
        (["--reward", "exact", "--repeats", "0"], "--repeats 0 must be at least 1"),
        (["--reward", "exact", "--sample", "1"], "--sample 1 must be at least 2"),
    ],
)
def test_a_mistake_gets_one_sentence(more, said, tmp_path, capsys):
    assert main(["reward", "audit", str(run_with(tmp_path)), *more]) != 0
    assert said in capsys.readouterr().err


def test_of_a_long_run_as_many_files_are_read_as_groups_are_wanted(tmp_path):
    run = run_with(tmp_path)
    whole = rollouts.path_of(run / "rollouts", 1)
    for step in range(2, 101):
        rollouts.path_of(run / "rollouts", step).write_bytes(whole.read_bytes() if step == 51 else b"not read")
    found, names = recorded_groups(run, (1, None), 8)  # two groups of four, of the first step and the middle one
    assert (len(found), names) == (2, ["exact"])
    every, _ = recorded_groups(run, (1, 1), 512)
    assert len(every) == 3
