"""A detector of one's own in a few lines: told like the others, with any action, and unable to end a run by a mistake."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from covey.errors import ConfigError
from covey.monitor.history import History
from covey.monitor.setup import audit_metrics, paid_weights
from covey.monitor.watch import Watch
from covey.rewards import RewardSpec, Scorer
from covey.types import Alert, StepReport
from faults.small_runs import lines, options, trainer

RUN = {"max_steps": 3, "save_strategy": "no", "max_completion_length": 3, "lr_scheduler_type": "constant"}
FILE = """
def too_polite(history):
    seen = history["tokens/completions"].last(2)
    if len(seen) == 2:
        return history.alert("too_polite", "warning", "please, always", ["lower its weight"], rate=sum(seen))
"""


def broken(history: History) -> Any:
    return [][0]


def odd(history: History) -> Any:
    return "too long"


def critical(history: History) -> Any:
    return history.alert("mine", "critical", "too long", "shorter")  # type: ignore[arg-type]


def test_a_detector_from_a_file_sees_any_metric_and_is_told_with_its_action(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    given = {"alert_detectors": [f"{tmp_path}/mine.py:too_polite"], "alert_actions": {"too_polite": "stop"}}
    done = trainer(tmp_path / "run", **given, **RUN).train()
    (told,) = [one for one in lines(tmp_path / "run", "alerts.jsonl") if one["rule"] == "too_polite"]
    assert told["step"] == done.global_step == 2, "the run was stopped by it"
    assert (told["said"], told["try_this"]) == ("please, always", ["lower its weight"])
    assert told["evidence"]["rate"] == sum(line["tokens/completions"] for line in lines(tmp_path / "run"))


def test_one_that_raises_or_returns_something_else_is_an_alert_and_the_run_goes_on(tmp_path):
    done = trainer(tmp_path / "run", alert_detectors=[broken, odd, critical], **RUN).train()
    assert done.global_step == 3
    told = [one for one in lines(tmp_path / "run", "alerts.jsonl") if one["rule"] == "detector_failed"]
    assert "the detector broken raised IndexError" in told[0]["said"]
    assert [one["evidence"]["detector"] for one in told] == ["broken", "odd", "critical"], "each once"
    assert "'critical', which is none of info, warning, error" in told[2]["said"]
    assert told[0]["evidence"]["at"].startswith(__file__)
    assert "broken" in json.loads((tmp_path / "run" / "run.json").read_text())["config"]["alert_detectors"][0]
    assert "broken" in options(tmp_path / "other", alert_detectors=[broken]).to_json_string(), "what trackers are given"


@pytest.mark.parametrize(
    "given, said",
    [
        ({"alert_detectors": ["nowhere.py:f"]}, "does not exist"),
        ({"alert_detectors": [3]}, "alert_detectors has 3, which cannot be called"),
        (
            {"alert_detectors": [broken], "alert_actions": {"brokn": "stop"}},
            "'brokn', which is no alert. Did you mean broken?",
        ),
    ],
)
def test_what_is_no_detector_is_refused_at_the_door(given, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        options(tmp_path / "run", **given)


def test_advice_may_be_one_text():
    assert History().alert("mine", "info", "too long", "shorter").try_this == ("shorter",)


@pytest.mark.parametrize("parts, names", [("reward", ("reward",)), (None, ()), (["a", "b"], ("a", "b"))], ids=str)
def test_the_parts_may_be_one_text_or_none(parts, names):
    history, how = History(), {"rule": "mine", "severity": "info", "said": "too long"}
    for alert in (
        history.alert(**how, try_this="shorter", parts=parts),
        Alert(**how, step=0, try_this="shorter", parts=parts),  # type: ignore[arg-type]
    ):
        assert (alert.parts, alert.try_this) == (names, ("shorter",))
        watch = Watch((lambda history, alert=alert: alert,))
        assert watch(StepReport(step=1, metrics={})) == [alert]
        assert [*watch.sent] == ([f"mine {name}" for name in names] or ["mine"])


def honest(completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def test_a_reward_that_brings_its_own_weight_is_watched_by_it():
    watched, paid = (
        RewardSpec(name=name, call=honest, weight=weight) for name, weight in (("watched", 0.0), ("paid", 2.0))
    )
    scorer, args = Scorer([watched, paid]), SimpleNamespace(audit_metrics=None)
    assert audit_metrics(args, scorer.names, scorer.weight_options) == ("rewards/watched/mean", "eval_reward")
    assert paid_weights(scorer.names, scorer.weight_options) == {"paid": 2.0}
