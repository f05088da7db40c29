"""Forgetting: what a fixed set loses against its best earlier evaluation, in the log and as an alert."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from covey.training.evaluator import Forgetting
from faults.small_runs import ROWS, trainer


def rows(scores: list[float]) -> list[dict[str, Any]]:
    return [{"question": str(i), "uid": f"0:{i}", "reward": score} for i, score in enumerate(scores)]


def after(*evaluated: list[float]) -> Forgetting:
    forgetting = Forgetting()
    for scores in evaluated:
        forgetting("eval", rows(scores))
    return forgetting


def test_it_is_the_best_earlier_evaluation_minus_this_one_question_by_question() -> None:
    forgetting = after([0.0] * 40, [1.0] * 30 + [0.0] * 10, [1.0] * 20 + [0.0] * 20)
    found = forgetting("eval", rows([1.0] * 10 + [0.0] * 30))
    assert found["eval_forgetting"] == pytest.approx(0.5), "30 of 40 were right at best, 10 are"
    assert found["eval_forgetting/low"] == pytest.approx(0.5 - 1.96 * 0.50637 / 40**0.5, abs=1e-3)
    assert found["eval_forgetting/p"] == pytest.approx(3 * 2**-19, rel=1e-6), "McNemar's p for 20 losses, three looks"


def test_a_better_evaluation_has_forgotten_less_than_nothing_and_the_first_has_none() -> None:
    assert Forgetting()("eval", rows([1.0] * 4)) == {}
    assert after([0.0, 0.0, 1.0, 0.0])("eval", rows([1.0, 0.0, 1.0, 0.0]))["eval_forgetting"] == -0.25


def test_other_questions_and_other_sets_are_not_compared() -> None:
    assert after([1.0] * 3)("eval", rows([0.0] * 4)) == {}
    assert after([1.0] * 4)("eval_hard", rows([0.0] * 4)) == {}


def test_a_checkpoint_holds_what_is_compared_with() -> None:
    forgetting, again = after([1.0] * 6, [0.0] * 6), Forgetting()
    again.load_state_dict(forgetting.state_dict())
    assert again("eval", rows([0.0] * 6)) == forgetting("eval", rows([0.0] * 6)) != {}


@pytest.mark.slow
def test_a_run_logs_it_writes_it_down_and_alerts(tmp_path: Path) -> None:
    calls = {"n": 0}

    def fades(completions: list[str], **columns: Any) -> list[float]:
        """Evaluations (of 24 prompts) are right the first time and never again."""
        is_evaluation = len(completions) > 8
        calls["n"] += is_evaluation
        return [float(not is_evaluation or calls["n"] == 1)] * len(completions)

    held_out = Dataset.from_list([{**ROWS[0], "prompt": f"What is {i} + {i}?"} for i in range(24)])
    one = trainer(
        tmp_path / "run", reward_funcs=fades, eval_dataset=held_out, eval_strategy="steps", eval_steps=1,
        eval_on_start=True, max_steps=3, per_device_eval_batch_size=96, num_generations=4,
    )  # fmt: skip
    one.train()
    logged = {entry["step"]: entry["eval_forgetting"] for entry in one.state.log_history if "eval_forgetting" in entry}
    assert logged == {1: 1.0, 2: 1.0, 3: 1.0}
    lines = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [line.get("eval_forgetting") for line in lines] == [None, 1.0, 1.0, 1.0]
    alerts = [json.loads(line) for line in (tmp_path / "run" / "alerts.jsonl").read_text().splitlines()]
    (alert,) = [alert for alert in alerts if alert["rule"] == "forgetting"]
    assert alert["said"].startswith("the mean reward on a fixed set fell from its best evaluation: eval by 1 (p = ")


def test_a_resume_with_other_questions_says_that_nothing_is_compared(tmp_path: Path, caplog: Any) -> None:
    held_out = [Dataset.from_list([{**ROWS[0], "prompt": f"What is {i} {sign} 2?"} for i in range(2)]) for sign in "+-"]
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, "save_steps": 1}
    trainer(tmp_path / "run", eval_dataset=held_out[0], max_steps=1, **options).train()
    assert "earlier evaluations" not in caplog.text
    trainer(tmp_path / "run", eval_dataset=held_out[0], max_steps=2, **options).train(resume_from_checkpoint=True)
    assert "earlier evaluations" not in caplog.text
    trainer(tmp_path / "run", eval_dataset=held_out[1], max_steps=3, **options).train(resume_from_checkpoint=True)
    assert "the questions of eval are not those of its earlier evaluations" in caplog.text
