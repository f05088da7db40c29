"""Planted series of metrics: what goes up and down is told, what rises, rests or is merely noisy is not; so are bought rewards."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest

from covey.monitor.detectors.swings import reward_conflict, reward_swings, turning_points
from covey.monitor.history import History
from kit import rest_nightly


def told(detector, series, steps=120):
    """The first alert of `detector` in a run whose metrics `series` are functions of the step, or None."""
    seen = History()
    for step in range(1, steps + 1):
        seen.add(step, {name: value(step) for name, value in series.items()})
        alert = detector(seen)
        if alert is not None:
            return alert
    return None


def rewards(value, spread=0.3, prompts=16):
    constant = spread if callable(spread) else (lambda step: spread)
    return {"reward": value, "reward_std": constant, "num_prompts": lambda step: float(prompts)}


def noisy(value, size, seed):
    draw = random.Random(seed)
    return lambda step: value(step) + size * draw.gauss(0, 1)


def clipped(value):
    return lambda step: min(1.0, max(0.0, value(step)))


HEALTHY = {
    "a smooth steep rise": lambda seed: rewards(lambda step: 1 - math.exp(-step / 4), spread=0.05),
    "a straight rise": lambda seed: rewards(lambda step: step / 120, spread=0.01),
    "a smooth fall": lambda seed: rewards(lambda step: math.exp(-step / 10), spread=0.01),
    "a late jump": lambda seed: rewards(lambda step: float(step > 60), spread=0.01),
    "a plateau": lambda seed: rewards(noisy(lambda step: min(step / 60, 0.6), 0.03, seed)),
    "a ceiling with little noise": lambda seed: rewards(
        clipped(noisy(lambda step: min(step / 30, 0.995), 0.01, seed)), spread=lambda step: 0.3 if step < 30 else 0.005
    ),
    "a ceiling from the start": lambda seed: rewards(clipped(noisy(lambda step: 0.99, 0.01, seed)), spread=0.002),
    "noise of few prompts": lambda seed: rewards(noisy(lambda step: 0.4, 0.15, seed), spread=0.45, prompts=8),
    "a slow start": lambda seed: rewards(noisy(lambda step: max(0.0, (step - 60) / 80), 0.02, seed)),
    "a length in tokens": lambda seed: rewards(noisy(lambda step: -200 + step, 10.0, seed), spread=60.0),
}
SWINGING = {
    "every other step": lambda seed: rewards(lambda step: 0.5 + 0.4 * (-1) ** step),
    "a period of eight steps": lambda seed: rewards(
        noisy(lambda step: 0.5 + 0.4 * math.sin(step * math.pi / 4), 0.02, seed)
    ),
    "while it rises": lambda seed: rewards(noisy(lambda step: step / 150 + 0.3 * math.sin(step), 0.02, seed)),
    "at the ceiling": lambda seed: rewards(lambda step: 1.0 if step % 4 < 2 else 0.4, spread=0.1),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_rises_rests_or_is_noisy_does_not_swing(name):
    for seed in range(20):
        alert = told(reward_swings, HEALTHY[name](seed))
        assert alert is None, (seed, alert)


@pytest.mark.parametrize("name", SWINGING)
def test_what_goes_up_and_down_swings(name):
    for seed in range(5):
        alert = told(reward_swings, SWINGING[name](seed))
        assert alert is not None
        assert "up and down" in alert.said
        assert alert.evidence["turns"] >= 4


def test_turning_points_are_where_values_come_back_far_enough():
    assert turning_points([0, 1, 2, 3], 0.5) == []
    assert turning_points([0, 2, 0, 2, 0], 1.0) == [2, 0, 2]
    assert turning_points([0, 2, 1.5, 2.5, 0], 1.0) == [2.5]
    assert turning_points([3, 3, 3], 0.5) == []


# -- one reward falls while the sum rises ----------------------------------------------------------------------------------------


def two(right, length, weight, seed, noise=0.04):
    right, length = noisy(right, noise, seed), noisy(length, noise, seed + 1000)
    seen = {}

    def total(step):
        seen[step] = (right(step), length(step))
        return seen[step][0] + weight * seen[step][1]

    return {
        "reward": total, "rewards/right/mean": lambda step: seen[step][0], "rewards/length/mean": lambda step: seen[step][1],
    }  # fmt: skip


def fading(start, end, over=60):
    return lambda step: start + (end - start) * min(1.0, step / over)


@pytest.mark.parametrize("seed", range(10))
def test_right_answers_that_are_given_up_for_length_are_named_with_their_numbers(seed):
    series = two(fading(0.52, 0.0), fading(0.2, 0.9), 3.0, seed)
    alert = told(partial(reward_conflict, weights={"right": 1.0, "length": 3.0}), series)
    assert alert is not None
    assert alert.evidence["reward"] == "right"
    assert alert.step < 60, "before all is lost"
    assert "right fell from 0.4" in alert.said, "the mean of the first ten steps"
    assert "reward_weights" in alert.try_this[0]


CONTENT = {
    "both rise": (fading(0.3, 0.8), fading(0.2, 0.4), 1.0),
    "nothing moves": (lambda step: 0.5, lambda step: 0.5, 1.0),
    "both fall": (fading(0.8, 0.3), fading(0.5, 0.2), 1.0),
    "a length penalty grows a little as answers become right": (fading(0.2, 0.8), fading(-0.3, -0.5), 0.2),
    "only noise": (lambda step: 0.5, fading(0.2, 0.9), 1.0),
    "it falls a little": (fading(0.6, 0.55), fading(0.2, 0.9), 1.0),
}


@pytest.mark.parametrize("name", rest_nightly(CONTENT, ("it falls a little", "both fall")))
def test_rewards_that_do_not_pull_apart_are_silent(name):
    right, length, weight = CONTENT[name]
    for seed in range(20):
        series = two(right, length, weight, seed)
        assert told(partial(reward_conflict, weights={"right": 1.0, "length": weight}), series, steps=200) is None


def test_one_reward_alone_or_one_that_may_fall_is_silent():
    series = two(fading(0.52, 0.0), fading(0.2, 0.9), 3.0, 0)
    assert told(partial(reward_conflict, weights={"right": 1.0}), series) is None
    assert told(partial(reward_conflict, weights={"length": 3.0, "other": 1.0}), series) is None
