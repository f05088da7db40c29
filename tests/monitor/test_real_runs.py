"""Detectors on the kept metrics of real runs of 500 steps: `tests/data/runs`, made by `benchmarks/detectors.py`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "alerts.md"


@pytest.fixture(scope="module")
def detectors() -> Any:
    spec = importlib.util.spec_from_file_location("detectors_benchmark", ROOT / "benchmarks" / "detectors.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kept(detectors) -> list[dict[str, Any]]:
    return detectors.kept()


@pytest.fixture(scope="module")
def judged(detectors, kept) -> Callable[[str], list[tuple[dict[str, Any], list[tuple[int, str, str]]]]]:
    """Each run of a half with the alerts of the detectors of today."""
    return cache(lambda half: [(one, detectors.replay(one)) for one in kept if detectors.half_of(one) == half])


def test_every_kept_run_is_of_five_hundred_steps_and_small(detectors, kept):
    assert {len(record["steps"]) for record in kept} == {500}
    sizes = [path.stat().st_size for path in detectors.KEPT.glob("*.json.gz")]
    assert max(sizes) < 40_000
    assert sum(sizes) < 1_600_000


@pytest.mark.nightly
@pytest.mark.parametrize(("half", "number"), [("fix", 40), ("judge", 20)])
def test_one_healthy_run_in_ten_at_most_has_a_false_alarm(detectors, judged, half, number):
    healthy = [found for one, found in judged(half) if one["fault"] is None]
    assert len(healthy) == number
    assert sum(any(detectors.is_loud(alert) for alert in found) for found in healthy) <= number / 10


@pytest.mark.nightly
@pytest.mark.parametrize(("half", "number", "least"), [("fix", 45, 41), ("judge", 25, 23)])
def test_faults_are_named_by_one_of_their_rules_as_often_as_the_page_says(detectors, judged, half, number, least):
    faulty = [pair for pair in judged(half) if pair[0]["fault"]]
    assert len(faulty) == number
    assert sum(detectors.named(*pair) is not None for pair in faulty) >= least


@pytest.mark.nightly
def test_the_page_shows_the_table_that_the_detectors_of_today_give(detectors, judged):
    assert detectors.table([*judged("fix"), *judged("judge")]) in PAGE.read_text(), (
        "python benchmarks/detectors.py table --write"
    )


def test_a_run_that_resembles_no_fault_is_silent_and_one_that_collapses_is_not(detectors):
    """The replay itself: a reward that rises, and the same run whose reward falls to nothing at step 60."""
    rising = {"reward": [0.2 + 0.005 * i + 0.02 * (i % 3) for i in range(100)], "reward_std": [0.4] * 100}
    record = {
        **{"audits": ["eval_reward"], "weights": {}, "steps": list(range(1, 101)), "non_finite_steps": []},
        **{"evaluations": [[0, {"eval_reward": 0.2}], [50, {"eval_reward": 0.5}]], "metrics": rising},
    }
    assert detectors.replay(record) == []
    fallen = {**rising, "reward": [*rising["reward"][:60], *[0.0] * 40]}
    found = detectors.replay({**record, "metrics": fallen, "non_finite_steps": [7]})
    assert (7, "non_finite", "error") in found
    assert next(rule for step, rule, _ in found if step > 60) == "reward_collapse"


def test_groups_that_tie_at_the_highest_reward_are_solved_if_they_came_there_by_degrees(detectors):
    """Of a reward that does not say what is right: no `groups/all_pass`."""
    is_solved = [i % 10 < i // 8 for i in range(90)]  # in more and more steps, and at last in all
    tied = [1.0 if solved else 0.5 for solved in is_solved]
    reward = [1.0 if solved else 0.6 for solved in is_solved]
    slow = {"reward": reward, "frac_reward_zero_std": tied}
    at_once = {"reward": [0.6] * 30 + [1.0] * 60, "frac_reward_zero_std": [0.2] * 30 + [1.0] * 60}
    record = {"audits": [], "weights": {}, "steps": list(range(1, 91)), "non_finite_steps": [], "evaluations": []}
    told = [
        {level for _, rule, level in detectors.replay({**record, "metrics": one}) if rule == "dead_groups"}
        for one in (slow, at_once)
    ]
    assert told == [{"info"}, {"warning"}]
