"""A run that is paid for length three times as much as for right answers: what it gives up is named while there is some left."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer, demo


def right(**columns):
    return demo.reward(**columns)


def long(completion_ids, **columns):
    return [len(ids) / 8 for ids in completion_ids]


@pytest.mark.nightly
def test_right_answers_that_a_length_reward_costs_are_named(tmp_path):
    args = GRPOConfig(
        output_dir=str(tmp_path / "run"), max_steps=45, per_device_train_batch_size=64, num_generations=8,
        max_completion_length=64, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, seed=0,
        learning_rate=6e-4, lr_scheduler_type="constant", use_cpu=True, reward_weights=[1.0, 3.0],
    )  # fmt: skip
    GRPOTrainer(
        model=str(demo.model_path()), reward_funcs=[right, long], args=args,
        train_dataset=Dataset.from_list(demo.rows("train", 256)),
    ).train()  # fmt: skip
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    answers = [line["rewards/right/mean"] for line in lines if "rewards/right/mean" in line]
    assert answers[0] > 0.4
    assert answers[-1] < 0.1
    alerts = map(json.loads, (tmp_path / "run" / "alerts.jsonl").read_text().splitlines())
    (alert,) = (alert for alert in alerts if alert["rule"] == "reward_conflict")
    assert alert["evidence"]["reward"] == "right"
