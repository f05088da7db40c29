"""When alerts speak: once, again when they grow worse or come back, never of times that were another machine's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial

import pytest

from covey.monitor.detectors import policy, rewards, standard, swings, teachers
from covey.monitor.history import History, noise, rise, shift
from covey.monitor.monitor import Monitor
from covey.monitor.watch import Watch, lines_of
from covey.types import Alert, Event, Last, StepReport


def report(step: int, tokens: float = 100.0, events: tuple[Event, ...] = (), rolls: bool = True, **metrics: float):
    seconds = {"step": 2.0, **({"rollout": 1.0} if rolls else {})}
    named = {name: Last(value) for name, value in {"num_tokens": tokens, **metrics}.items()}
    return StepReport(step=step, metrics=named, seconds=seconds, events=events)


def above(limit: float) -> Callable[[History], Alert | None]:
    """A detector that is a plain function: a warning above the limit, an error above twice the limit."""

    def detector(seen: History) -> Alert | None:
        value = seen["reward"].last(1)[0]
        severity = "error" if value > 2 * limit else "warning"
        return seen.alert("high", severity, f"it is {value}", ["less"], value=value) if value > limit else None

    return detector


def steps_told(values: list[float]) -> list[tuple[int, str]]:
    watch = Watch([above(1.0)])
    return [(a.step, a.severity) for i, value in enumerate(values) for a in watch(report(i + 1, reward=value))]


def test_a_fault_that_lasts_is_told_once():
    assert steps_told([0.0, 1.5, 1.5, 1.5]) == [(2, "warning")]


def test_a_fault_that_grows_more_severe_is_told_again():
    assert steps_told([1.5, 1.5, 2.5, 1.5, 2.5]) == [(1, "warning"), (3, "error")]


def test_a_fault_that_flickers_is_one_fault_and_one_that_returns_after_twenty_steps_another():
    assert steps_told([1.5, 0.0, 1.5, 0.0, 1.5]) == [(1, "warning")]
    assert steps_told([1.5] + [0.0] * 20 + [1.5]) == [(1, "warning"), (22, "warning")]


def test_an_alert_says_what_to_try_and_rounds_its_evidence():
    (alert,) = Watch([above(1.0)])(report(3, reward=1.23456))
    assert alert.evidence == {"value": 1.235}
    assert list(lines_of(alert)) == ["warning at step 3, high: it is 1.23456", "  try: less"]


def test_a_step_that_was_left_out_is_told_even_though_its_numbers_are_nan():
    watch = Watch(standard())
    bad = (Event(kind="non_finite_step", said="step 2: loss nan"),)
    assert watch(report(1, grad_norm=1.0)) == []
    assert [alert.rule for alert in watch(report(2, events=bad, grad_norm=math.nan))] == ["non_finite"]


def test_steps_that_reuse_a_rollout_are_no_change_of_speed():
    watch = Watch(standard())
    for step in range(1, 200):
        # rollouts of one step, then of four steps: a step without a rollout takes as long here, and sees other tokens
        assert watch(report(step, rolls=step < 100 or step % 4 == 0, tokens=100.0)) == []
    assert set(watch.history["tokens_per_second/step"].recent) == {50.0}


def test_a_machine_that_slows_down_is_told():
    watch = Watch(standard())
    told = [a.rule for step in range(1, 100) for a in watch(report(step, tokens=100.0 if step < 60 else 20.0))]
    assert told == ["throughput_drop"]


def test_what_was_seen_survives_a_checkpoint_and_times_do_not():
    first, draw = Watch([above(1.0)]), random.Random(0)
    for step in range(1, 300):
        first(report(step, reward=draw.random()))
    first(report(300, reward=1.5))
    second = Watch([above(1.0)])
    second.load_state_dict(first.state_dict())
    assert second.history["reward"] is not first.history["reward"]
    assert second.history["reward"].last(200) == first.history["reward"].last(200)
    assert second.history["reward"].count == 300
    assert second.history["tokens_per_second/step"].count == 0
    assert second(report(301, reward=1.5)) == []


@pytest.mark.parametrize(
    "actions, expected",
    [
        ({}, "log"),
        ({"all": "stop"}, "stop"),
        ({"all": "stop", "warning": "off"}, "off"),
        ({"all": "stop", "warning": "off", "high": "roll_back"}, "roll_back"),
        ({"error": "stop"}, "log"),
    ],
)
def test_the_action_of_a_rule_wins_over_that_of_its_severity_and_of_all(actions, expected):
    alert = Alert(rule="high", severity="warning", said="", step=1)
    assert Monitor(actions=actions).action_for(alert) == expected


def test_noise_is_told_apart_from_a_trend():
    draw = random.Random(0)
    values = [0.01 * i + draw.gauss(0, 0.1) for i in range(400)]
    assert noise(values) == pytest.approx(0.1, rel=0.1)
    rose, error = rise(values)
    assert rose == pytest.approx(3.99, abs=4 * error)
    assert error == pytest.approx(0.1 * math.sqrt(12 / 400), rel=0.1)
    assert shift([1.0, 1.0], [1.0, 1.0]).z == 0
    assert shift([1.0, 1.0], [2.0, 2.0]).z == math.inf


def test_a_second_part_of_the_run_with_the_same_fault_is_told_too():
    watch, told = Watch(standard()), []
    for step in range(1, 80):
        late = float(step >= 50)
        values = {
            "completions/count": 10.0,
            "rewards/a/errors": 5.0,
            "rewards/b/errors": 9.0 * late,
            "rewards/unscored": 0.0,
        }
        if step % 10 == 0:
            sets = {"eval_x": 0.1, "eval_y": 0.3 * late}
            watch.evaluated({f"{name}_forgetting": lost for name, lost in sets.items()})
            watch.evaluated({f"{name}_forgetting/p": 1e-4 if lost else 1.0 for name, lost in sets.items()})
        told += [(alert.step, alert.rule, alert.parts) for alert in watch(report(step, **values))]
    assert [parts for _, rule, parts in told if rule == "reward_errors"] == [("a",), ("a", "b")]
    assert [parts for _, rule, parts in told if rule == "forgetting"] == [("eval_x",), ("eval_x", "eval_y")]


HIDDEN = {
    "member_idle": (
        partial(teachers.member_idle, window=5),
        {f"ensemble/{name}/{what}": 0.0 for name in "ab" for what in ("asked", "used")},
        ("a", "b"),
    ),
    "member_dominates": (
        partial(teachers.member_dominates, window=5),
        {f"ensemble/{name}/{what}": 1.0 for name, what in (("a", "share"), ("b", "win_rate"))}
        | {"ensemble/a/asked": 1.0, "ensemble/b/asked": 1.0},
        ("a", "b"),
    ),
    "reward_hacking": (
        partial(rewards.reward_hacking, audits=("a", "b")),
        {"reward": 0.01, "a": -0.01, "b": -0.01},
        ("a", "b"),
    ),
    "reward_conflict": (
        partial(swings.reward_conflict, weights={"a": 1.0, "b": 1.0, "c": 5.0}),
        {"reward": 0.01, "rewards/a/mean": -0.01, "rewards/b/mean": -0.01, "rewards/c/mean": 0.01},
        ("a", "b"),
    ),
    "router_drift": (
        policy.router_drift,
        {"experts/entropy": -0.01, "experts/changed": 0.9, "experts/max_load": 0.9},
        ("load", "choices"),
    ),
    "tool_collapse": (
        policy.tool_collapse,
        {"tools/call_frequency": 3.0, "tools/failure_frequency": 1.0, "tools/looping": 1.0},
        ("repeated calls", "failed calls"),
    ),
}


@pytest.mark.parametrize("rule", HIDDEN)
def test_a_fault_of_one_part_hides_none_of_another(rule):
    detector, values, parts = HIDDEN[rule]
    history = History()
    for step in range(1, 81):  # values below 0.1 are slopes
        history.add(step, {name: 1.0 + step * x if 0 < abs(x) < 0.1 else x for name, x in values.items()})
    alert = detector(history)
    assert (alert.rule, alert.parts) == (rule, parts)
    of_parts = dict.fromkeys(name.partition(": ")[0] for name in alert.evidence)
    assert tuple(of_parts) == parts, "each has its own numbers"
    assert "; " in alert.said
