"""Thresholds that know their noise: few completions a step, many looks, heavy tails."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest

from covey.monitor.detectors.policy import diversity_loss, entropy_collapse, kl_runaway
from covey.monitor.detectors.text import truncation
from covey.monitor.detectors.updates import spike
from covey.monitor.history import History, may_have_risen, normal_deviate, shift
from covey.types import Alert


def alerts(
    detector: Callable[[History], Alert | None], values: Callable[[int], Mapping[str, float]], steps: int
) -> list[Alert]:
    seen, found = History(), []
    for step in range(steps):
        seen.add(step, values(step))
        found.append(detector(seen))
    return [alert for alert in found if alert is not None]


@pytest.mark.parametrize(
    ("t", "freedom", "normal"),
    [(2.228, 10, 1.960), (3.169, 10, 2.576), (4.144, 10, 3.090), (2.776, 4, 1.960), (3.460, 30, 3.144)],
)
def test_students_t_becomes_the_normal_deviate_of_the_same_tail(t, freedom, normal):
    """Tables of both distributions at two-sided 5%, 1%, 0.2%, 5% and 0.1665%."""
    assert normal_deviate(t, freedom) == pytest.approx(normal, rel=0.01)
    assert normal_deviate(-t, freedom) == -normal_deviate(t, freedom)


def test_ten_steps_differ_from_ten_others_by_chance_as_rarely_as_their_deviate_says():
    draw = random.Random(0)
    ten = lambda: [draw.gauss(0, 1) for _ in range(10)]
    far = sum(abs(shift(ten(), ten()).z) > 2.576 for _ in range(20_000)) / 20_000
    assert 0.007 < far < 0.014, "1% for a normal deviate; of bare standard errors it would be above 2%"


@pytest.mark.parametrize(("prompts", "rise", "is_told"), [(4, 0.3, False), (256, 0.3, False), (256, 0.0, True)])
def test_entropy_and_diversity_wait_until_noise_cannot_hide_a_rise_of_the_reward(prompts, rise, is_told):
    """With four prompts a step, ten steps against ten would not see this rise beyond noise in most runs."""
    draw = random.Random(1)

    def values(step: int) -> dict[str, float]:
        falls = 0.1 ** min(step / 50, 1.0)
        return {
            "reward": 0.4 + rise * min(step / 20, 1.0) + draw.gauss(0, 0.5 / prompts**0.5),
            **{"reward_std": 0.5, "entropy": falls, "diversity/unique": falls, "frac_reward_zero_std": 0.2},
        }

    assert bool(alerts(entropy_collapse, values, 120)) is is_told
    assert bool(alerts(diversity_loss, values, 120)) is is_told


def test_a_reward_that_fell_has_not_risen_however_noisy():
    seen = History()
    for step in range(60):
        seen.add(step, {"reward": 1.0 - 0.01 * step + 0.3 * (-1) ** step, "reward_std": 0.5})
    assert not may_have_risen(seen)


def test_a_kl_that_jumps_is_no_runaway_and_one_that_grows_is():
    jumps = [random.Random(seed) for seed in range(10)]
    told = [
        bool(alerts(kl_runaway, lambda step, draw=draw: {"kl": draw.lognormvariate(-1, 1.0)}, 500)) for draw in jumps
    ]
    assert sum(told) <= 1
    assert alerts(kl_runaway, lambda step: {"kl": 0.01 * 1.3**step}, 40)


def test_gradients_of_a_heavy_tail_are_no_spikes_and_one_beyond_it_is_even_after_another():
    """Norms of a power law of exponent 2: one in 200 steps is ten times the median."""
    told, high = [], []
    for seed in range(10):
        draw = random.Random(seed)
        norms = [0.3 * draw.random() ** -0.5 for _ in range(500)]
        told.append(bool(alerts(spike, lambda step, norms=norms: {"grad_norm": norms[step]}, 500)))
        high.append(max(norms) > 10 * sorted(norms)[250])
    assert sum(high) >= 5, "of ten times the median alone one would be told"
    assert sum(told) <= 2
    planted = [1e4 if step in (300, 350) else norm for step, norm in enumerate(norms)]
    found = alerts(spike, lambda step: {"grad_norm": planted[step]}, 400)
    assert {300, 350} <= {alert.step for alert in found}


@pytest.mark.parametrize(
    ("cut_at_start", "reward_gain", "severity"),
    [(0.0, 0.5, "info"), (0.0, 0.0, "warning"), (0.6, 0.5, "warning")],
)
def test_completions_cut_from_the_start_or_for_nothing_are_a_warning(cut_at_start, reward_gain, severity):
    draw = random.Random(0)

    def values(step: int) -> dict[str, float]:
        done = min(step / 60, 1.0)
        cut = cut_at_start + (0.6 - cut_at_start) * done
        return {"completions/clipped_ratio": cut, "reward": 0.2 + reward_gain * done + draw.gauss(0, 0.05)}

    assert {alert.severity for alert in alerts(truncation, values, 100)[-20:]} == {severity}
