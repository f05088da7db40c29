"""A learning rate that breaks the model is named: before the run, at the step that it breaks at, and by what follows."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer, demo
from covey.monitor.detectors import standard
from covey.monitor.history import History


def trained(folder, learning_rate, steps):
    args = GRPOConfig(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=16, num_generations=4, max_completion_length=24,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, seed=0, learning_rate=learning_rate,
        use_cpu=True,
    )  # fmt: skip
    GRPOTrainer(
        model=str(demo.model_path()), reward_funcs=demo.reward, args=args,
        train_dataset=Dataset.from_list(demo.rows("train", 32)),
    ).train()  # fmt: skip
    alerts = folder / "alerts.jsonl"
    return [json.loads(line) for line in alerts.read_text().splitlines()] if alerts.exists() else []


@pytest.mark.slow
def test_5e_2_is_advised_against_at_the_start_and_named_when_it_breaks(tmp_path, caplog):
    alerts = trained(tmp_path / "run", 5e-2, 12)
    assert "learning_rate=0.05 is high" in caplog.text
    first = alerts[0]
    assert (first["rule"], first["severity"], first["step"]) == ("large_updates", "error", 1)
    assert "at a learning_rate of 0.05" in first["said"]
    assert first["try_this"][0].startswith("lower learning_rate")
    (dead,) = (alert for alert in alerts if alert["rule"] == "dead_groups")
    assert "a learning_rate of 0.05 has moved the weights by up to" in dead["said"]
    assert dead["try_this"][0].startswith("lower learning_rate")


@pytest.mark.slow
def test_the_learning_rate_that_the_model_learns_at_is_not_named(tmp_path, caplog):
    assert trained(tmp_path / "run", 6e-4, 3) == []
    assert "learning_rate" not in caplog.text


FAULTS = {
    "reward_collapse": lambda step: {"reward": 0.7 if step < 25 else 0.1},
    "entropy_explosion": lambda step: {"entropy": 0.3 if step < 25 else 4.0, "reward": 0.3},
    "kl_runaway": lambda step: {"kl": 0.01 if step < 25 else 3.0},
    "repeated_text": lambda step: {"completions/repetition": 0.1 if step < 25 else 0.9},
    "non_finite": lambda step: {"steps/non_finite": float(step == 25)},
}


@pytest.mark.parametrize("rule", FAULTS)
@pytest.mark.parametrize("size, is_named", [(0.3, True), (0.004, False)])
def test_what_follows_names_it_where_steps_were_large_and_only_there(rule, size, is_named):
    seen, found = History(), {}
    for step in range(1, 60):
        seen.add(step, {"learning_rate": 5e-2, "update/all": size if step == 20 else 1e-3, **FAULTS[rule](step)})
        found |= {alert.rule: alert for detector in standard() if (alert := detector(seen)) and alert.rule not in found}
    assert ("large_updates" in found) is is_named
    if rule != "non_finite":
        assert ("a learning_rate of 0.05 has moved the weights by up to 30%" in found[rule].said) is is_named
    else:
        assert "at a learning_rate of 0.05" in found[rule].said
