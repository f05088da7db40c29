"""Alerts of real runs: what goes wrong is told in the run folder and on the screen, with evidence and a remedy."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from covey.config.alerts import late_checkpoint
from covey.errors import ConfigError
from faults.small_runs import lines, options, trainer

LONG = {"max_steps": 12, "save_strategy": "no", "max_completion_length": 4}


def constant(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def told(folder: Path) -> list[dict[str, Any]]:
    return lines(folder, "alerts.jsonl") if (folder / "alerts.jsonl").exists() else []


def test_rewards_that_never_differ_are_told_as_dead_groups_with_evidence_and_a_remedy(tmp_path, capsys):
    trainer(tmp_path / "run", reward_funcs=constant, disable_tqdm=False, **LONG).train()
    dead = [alert for alert in told(tmp_path / "run") if alert["rule"] == "dead_groups"]
    assert len(dead) == 1, "told once, not at every step"
    assert dead[0]["step"] == 10
    assert dead[0]["severity"] == "warning"
    assert dead[0]["evidence"] == {"tied": 1.0, "all_pass": 0.0, "all_fail": 1.0}
    assert "teach nothing" in dead[0]["said"]
    assert any("test the reward" in advice for advice in dead[0]["try_this"])
    assert set(dead[0]) == {"step", "rule", "severity", "said", "evidence", "try_this"}
    shown = capsys.readouterr().err
    assert "warning at step 10, dead_groups: 100% of groups have tied rewards" in shown
    assert "try: the prompts are too hard" in shown


def test_a_rule_that_is_off_is_not_told(tmp_path):
    trainer(tmp_path / "run", reward_funcs=constant, alert_actions={"dead_groups": "off"}, **LONG).train()
    assert "dead_groups" not in {alert["rule"] for alert in told(tmp_path / "run")}


@pytest.mark.nightly
def test_all_can_be_off(tmp_path):
    trainer(tmp_path / "run", reward_funcs=constant, alert_actions={"all": "off"}, **LONG).train()
    assert told(tmp_path / "run") == []


def test_an_alert_can_stop_the_run_with_a_checkpoint(tmp_path):
    saving = LONG | {"save_strategy": "steps", "save_steps": 100}
    out = trainer(tmp_path / "run", reward_funcs=constant, alert_actions={"dead_groups": "stop"}, **saving).train()
    assert out.global_step == 10
    assert (tmp_path / "run" / "checkpoint-10").is_dir()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "stopped"
    (event,) = [e for e in lines(tmp_path / "run", "events.jsonl") if e["kind"] == "stopped_by_alert"]
    assert "dead_groups at step 10" in event["said"]


def test_an_alert_can_lower_the_learning_rate_once(tmp_path):
    actions = {"dead_groups": "lower_learning_rate"}
    constant_rate = {"lr_scheduler_type": "constant", "learning_rate": 1e-3, "roll_back_learning_rate": 0.25}
    trainer(tmp_path / "run", reward_funcs=constant, alert_actions=actions, **LONG, **constant_rate).train()
    rates = [line["learning_rate"] for line in lines(tmp_path / "run")]
    assert rates == [pytest.approx(1e-3)] * 10 + [pytest.approx(0.25e-3)] * 2
    (event,) = [e for e in lines(tmp_path / "run", "events.jsonl") if e["kind"] == "learning_rate_lowered"]
    assert event["step"] == 10


@pytest.mark.filterwarnings("ignore:.*goes on from step")
def test_an_alert_can_take_the_run_back_to_the_checkpoint_before_it_and_stops_it_when_that_does_not_help(tmp_path):
    saving = LONG | {"save_strategy": "steps", "save_steps": 5, "roll_backs_limit": 1}
    out = trainer(tmp_path / "run", reward_funcs=constant, alert_actions={"dead_groups": "roll_back"}, **saving).train()
    back, ended = [e for e in lines(tmp_path / "run", "events.jsonl") if e["kind"] != "spike"]
    assert back["kind"] == "rolled_back"
    assert back["details"]["from_step"] == 10
    assert back["details"]["to_step"] == 5, "the checkpoint of the alert's own step is not trusted"
    assert ended["kind"] == "stopped_by_alert"
    assert out.global_step == 10
    assert [alert["step"] for alert in told(tmp_path / "run") if alert["rule"] == "dead_groups"] == [10, 10]


@pytest.mark.parametrize(
    "given, total, is_told",
    [
        ({"alert_actions": {"all": "roll_back"}, "save_steps": 12}, 12, True),
        ({"alert_actions": {"all": "roll_back"}, "save_steps": 11}, 12, False),
        ({"alert_actions": {"all": "roll_back"}, "save_steps": 0.5}, 12, False),
        ({"alert_actions": {"all": "roll_back"}, "save_strategy": "epoch"}, 12, False),
        ({"alert_actions": {"all": "stop"}, "save_steps": 500}, 12, False),
        ({"on_bad_numbers": "roll_back", "save_steps": 500}, 12, True),
        ({"on_spike": "roll_back", "save_steps": 500}, 501, False),
    ],
)
def test_a_rollback_that_would_find_no_checkpoint_is_told_by_name(tmp_path, given, total, is_told):
    said = late_checkpoint(options(tmp_path / "run", **{"save_strategy": "steps", **given}), total)
    assert (said is not None) == is_told
    assert said is None or (next(iter(given)) in said and f"save_steps={given['save_steps']}" in said)


@pytest.mark.filterwarnings("ignore:.*goes on from step")
def test_a_run_says_once_at_its_start_that_it_saves_too_late_to_roll_back(tmp_path, caplog):
    saving = {"max_completion_length": 4, "save_strategy": "steps", "save_steps": 2, "on_spike": "roll_back"}
    trainer(tmp_path / "run", max_steps=2, **saving).train()
    assert [r.getMessage() for r in caplog.records if "can roll back" in r.getMessage()] == [
        "advice: on_spike can roll back, but save_steps=2 saves no checkpoint before the last of 2 steps, so the run would end "
        "instead; set save_steps below the step of the first fault to expect."
    ]
    caplog.clear()
    trainer(tmp_path / "run", max_steps=3, **saving | {"save_steps": 3}).train(resume_from_checkpoint=True)
    assert not any("can roll back" in r.getMessage() for r in caplog.records), "checkpoint-2 is there"


@pytest.mark.slow
def test_a_run_that_is_resumed_tells_the_same_alerts_as_one_that_never_stopped(tmp_path):
    saving = LONG | {"save_strategy": "steps", "save_steps": 6}
    trainer(tmp_path / "whole", reward_funcs=constant, **saving).train()
    trainer(tmp_path / "half", reward_funcs=constant, **saving).train()
    shutil.rmtree(tmp_path / "half" / "checkpoint-12")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(tmp_path / "half", reward_funcs=constant, **saving).train(resume_from_checkpoint=True)
    assert told(tmp_path / "half") == told(tmp_path / "whole") != []


def test_what_alerts_are_seen_in_is_in_the_metrics(tmp_path):
    trainer(tmp_path / "run", **LONG).train()
    seen = lines(tmp_path / "run")[-1]
    for name in ("diversity/unique", "completions/repetition", "prompts/drift", "prompts/mean_length", "update/all"):
        assert name in seen
    assert 0 < seen["update/all"] < 1
    assert seen["completions/count"] == 8


@pytest.mark.parametrize(
    "given, said",
    [
        ({"alert_actions": {"dead_group": "off"}}, "alert_actions names 'dead_group'.*dead_groups"),
        ({"alert_actions": "stop"}, "alert_actions='stop' is not a mapping"),
        ({"alert_actions": {"all": "halt"}}, "the action 'halt', which is not known"),
        ({"alert_actions": {"kl_runaway": "roll_back"}, "save_strategy": "no"}, "no checkpoint to go back to is saved"),
        ({"alert_webhook": "hooks.example.com/abc"}, "alert_webhook is not an address"),
        ({"alert_webhook": "file:///etc/passwd"}, "alert_webhook is not an address"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_run(tmp_path, given, said):
    with pytest.raises(ConfigError, match=said):
        options(tmp_path / "run", **given)
