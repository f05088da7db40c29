"""Answers that leave the language of their prompts: found before accuracy falls, and not seen where there is nothing to see."""

from __future__ import annotations

import random

import pytest

from covey.config.alerts import ALERT_RULES
from covey.monitor.detectors.text import language_collapse
from covey.monitor.slices import code_of, is_same, language_metrics
from covey.monitor.watch import Watch
from covey.types import Alert, Group, Mean, StepReport
from kit import group, rest_nightly

TEXTS = {
    "en": "She has the apples and the boy is on the way to it.",
    "de": "Sie hat die Äpfel und der Junge ist nicht mit dem Zug auf der Reise.",
    "zh": "她有三个苹果，然后又买了四个，所以一共是七个。",
}


def simulated(seed: int, steps: int, leaves_at: int | None = None, accuracy_falls_at: int | None = None) -> list[Alert]:
    """Alerts of a run over three languages: 12 prompts of 4 answers a step, each language with a share of strays of its own.

    From `leaves_at` on Chinese prompts are answered in English more and more often, 3% a step, as where English earns more.
    """
    draw, watch, alerts = random.Random(seed), Watch([language_collapse]), []
    strays = {code: draw.uniform(0.0, 0.1) for code in TEXTS}
    for step in range(1, steps + 1):
        groups: list[Group] = []
        for i in range(12):
            code = "en" if draw.random() < 0.3 else draw.choice(("de", "zh"))
            prompt_strays = min(1.0, strays[code] * draw.choice((0, 0, 3)))  # answers of one prompt stray together
            if leaves_at is not None and step >= leaves_at and code == "zh":
                prompt_strays = max(prompt_strays, min(1.0, 0.03 * (step - leaves_at)))
            texts = [
                TEXTS["de" if code == "en" else "en"] if draw.random() < prompt_strays else TEXTS[code]
                for _ in range(4)
            ]
            groups.append(group(texts, uid=f"0:{i}", columns={"language": code}))
        accuracy = 0.3 + 0.004 * step
        if accuracy_falls_at is not None and step >= accuracy_falls_at:
            accuracy -= 0.01 * (step - accuracy_falls_at)
        metrics = {**language_metrics(groups), "reward": Mean(accuracy + draw.gauss(0, 0.02), 1)}
        alerts += watch(StepReport(step=step, metrics=metrics))
    return alerts


@pytest.mark.parametrize("seed", rest_nightly(range(5), 1))
def test_a_collapse_is_found_before_accuracy_falls(seed: int):
    alerts = simulated(seed, steps=110, leaves_at=40, accuracy_falls_at=80)
    assert [alert.rule for alert in alerts] == ["language_collapse"]
    assert 40 < alerts[0].step < 80
    assert "zh" in alerts[0].said
    assert "the reward has not fallen" in alerts[0].said
    assert any("reward language" in advice for advice in alerts[0].try_this)
    assert "language_collapse" in ALERT_RULES


@pytest.mark.parametrize("seed", rest_nightly(range(100, 120), 1))
def test_twenty_healthy_runs_are_silent(seed: int):
    assert simulated(seed, steps=80) == []


def test_a_single_stray_answer_after_perfect_steps_is_no_collapse():
    watch = Watch([language_collapse])
    for step in range(1, 31):
        texts = [TEXTS["de"]] * 8 if step != 30 else [TEXTS["de"]] * 7 + [TEXTS["en"]]
        report = StepReport(step=step, metrics=language_metrics([group(texts, columns={"language": "de"})]))
        assert watch(report) == []


def test_languages_are_named_in_several_ways_and_short_answers_tell_nothing():
    assert (code_of("de"), code_of("German"), code_of("zh-Hans"), code_of(None), code_of("tlh")) == (
        "de",
        "de",
        "zh",
        None,
        None,
    )
    assert is_same("7", "de") is None
    assert language_metrics([group(["7", "8"], columns={"language": "de"})]) == {}
    assert language_metrics([group([TEXTS["en"]], columns={"level": 1})]) == {}
