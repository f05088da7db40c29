"""Drift told by two-sample tests: p-values that mean what they say, planted changes found, healthy runs silent."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from covey.monitor.detectors.pace import data_drift, reward_drift
from covey.monitor.sample_drift import SampleDrift, gamma_tail, has_fallen, kolmogorov_smirnov, maximum_mean_discrepancy
from covey.monitor.watch import Watch
from covey.types import Group, Prompt, StepReport
from kit import completion, rest_nightly

COMPLETIONS = (completion(),) * 4
WEIGHTS = torch.tensor([1.0])


def prompt_of(draw: random.Random, low: int, longer: int) -> Prompt:
    ids = [low + int(draw.random() ** 2 * 60) for _ in range(draw.randint(10, 30) + longer)]
    return Prompt(uid="0:0", token_ids=tuple(ids), text="")


def run(
    seed: int, steps: int, *, at: int = 10**9, low: int = 0, longer: int = 0, drop: float = 0.0
) -> list[tuple[str, int]]:
    """Rules and steps of a run whose reward rises; from step `at` on its prompts or rewards change."""
    draw, drift, watch, told = random.Random(seed), SampleDrift(), Watch([data_drift, reward_drift]), []
    for step in range(1, steps + 1):
        is_changed = step >= at
        groups = []
        for _ in range(8):
            skill = 0.3 + 0.005 * step - (drop if is_changed else 0.0)
            rewards = torch.tensor([[float(draw.random() < skill)] for _ in range(4)])
            prompt = prompt_of(draw, low if is_changed else 0, longer if is_changed else 0)
            groups.append(Group(prompt=prompt, completions=COMPLETIONS, rewards=rewards))
        if step == steps // 2:  # a resume in the middle changes nothing
            again = SampleDrift()
            again.load_state_dict(json.loads(json.dumps(drift.state_dict())))
            drift = again
        told += [(alert.rule, alert.step) for alert in watch(StepReport(step=step, metrics=drift(groups, WEIGHTS)))]
    return told


@pytest.mark.nightly
def test_p_values_are_as_small_as_chance_makes_them():
    """Of 200 pairs from one distribution about 5% are below 0.05, and no more than that of ties and of far tails."""
    draw = np.random.default_rng(0)
    ks, mmd = [], []
    for _ in range(200):
        ks.append(kolmogorov_smirnov(*draw.geometric(0.1, size=(2, 80)).astype(float)))
        mmd.append(maximum_mean_discrepancy(*draw.poisson(1.0, size=(2, 64, 16)).astype(float)))
    assert np.mean(np.array(ks) < 0.05) <= 0.06
    assert 0.025 <= np.mean(np.array(mmd) < 0.05) <= 0.08
    assert min(mmd) > 1e-5


def test_the_tests_agree_with_known_values():
    np.testing.assert_allclose(gamma_tail(3.0, 10.0), np.exp(-10.0) * (1 + 10 + 50), rtol=1e-9)
    np.testing.assert_allclose(gamma_tail(2.0, 1.0), np.exp(-1.0) * 2, rtol=1e-9)
    low, high = np.arange(50.0), np.arange(50.0) + 25  # D = 0.5, lambda = 2.5
    np.testing.assert_allclose(kolmogorov_smirnov(low, high), 2 * np.exp(-2 * 2.5**2), rtol=1e-6)
    assert has_fallen(high, low) < 1e-5
    assert has_fallen(low, high) == 1.0


@pytest.mark.parametrize("seed", rest_nightly(range(20), 2))
def test_twenty_healthy_runs_that_learn_are_silent(seed):
    assert run(seed, 60) == []


@pytest.mark.slow
def test_planted_changes_are_found_within_two_blocks():
    for seed in range(3):
        for change in ({"low": 20}, {"longer": 12}):
            rules = run(seed, 70, at=31, **change)
            assert rules[0][0] == "data_drift"
            assert 31 <= rules[0][1] <= 50
        assert ("reward_drift", 40) in run(seed, 70, at=31, drop=0.4)


def test_other_weights_are_no_fall_of_rewards():
    draw, drift = random.Random(0), SampleDrift()
    for step in range(40):
        rewards = torch.ones(2, 1)
        groups = [
            Group(prompt=prompt_of(draw, 0, 0), completions=(completion(),) * 2, rewards=rewards) for _ in range(8)
        ]
        found = drift(groups, torch.tensor([1.0 if step < 20 else 0.5]))
        assert "rewards/drift_p" not in found or found["rewards/drift_p"].value == 1.0


def test_a_row_has_a_length_64_counts_and_a_reward():
    """As the checkpoints of earlier runs have them, with whose blocks those after a resume are compared."""
    drift = SampleDrift()
    prompt = Prompt(uid="0:0", token_ids=tuple(range(300)), text="")
    drift([Group(prompt=prompt, completions=(completion(),), rewards=torch.ones(1, 1))], WEIGHTS)
    (row,) = drift.state_dict()["block"]
    assert len(row) == 1 + 64 + 1
    assert (row[0], sum(row[1:-1]), row[-1]) == (300.0, 299.0, 1.0)
