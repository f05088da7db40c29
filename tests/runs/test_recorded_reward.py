"""`reward` in rollouts/*.parquet: the weighted sum that advantages were made of, not the plain sum."""

from __future__ import annotations

import math

import pytest

from covey import algorithms as alg
from covey.doctor.why.recorded import groups_of
from covey.monitor.completions import rows as shown_rows
from covey.rewards import Scorer, reward_metrics
from covey.runs import completions, evaluations, rollouts
from covey.training.credit import with_advantages
from faults.small_runs import trainer
from kit import group


def long(completions):
    return [float(len(c)) for c in completions]


def first(completions):
    return [None if len(c) % 3 == 0 else float(ord(c[0]) % 5) for c in completions]


def recorded(folder, **options):
    trainer(folder, reward_funcs=[long, first], rollout_log_steps=1, save_strategy="no", **options).train()
    return [row for step in (1, 2, 3) for row in rollouts.read(folder / "rollouts" / f"step-{step:06d}.parquet")]


def weighted(row, *weights):
    scores = (row["reward/long"], row["reward/first"])
    return sum(weight * score for weight, score in zip(weights, scores, strict=True) if score is not None)


def test_it_is_the_weighted_sum_and_what_was_not_scored_counts_nothing(tmp_path):
    rows = recorded(tmp_path / "run", reward_weights=[0.5, -3.0], max_steps=3)
    assert any(row["reward/first"] is None for row in rows)
    assert [row["reward"] for row in rows] == pytest.approx([weighted(row, 0.5, -3.0) for row in rows])


def test_a_schedule_counts_with_the_weights_of_the_step_that_drew_the_rollout(tmp_path):
    rows = recorded(tmp_path / "run", reward_weights=["linear:1:0:2", 1.0], max_steps=3, steps_per_generation=2)
    weights = {1: 1.0, 2: 1.0, 3: 0.0}  # two steps a rollout
    assert [row["reward"] for row in rows] == pytest.approx([weighted(row, weights[row["step"]], 1.0) for row in rows])


def test_advantages_follow_from_it(tmp_path):
    rows = recorded(tmp_path / "run", reward_weights=[2.0, 1.0], max_steps=3, reward_clip=[-3.0, 3.0])
    by_group = {}
    for row in rows:
        by_group.setdefault((row["step"], row["group"]), []).append(row)
    for own in by_group.values():
        mean = sum(row["reward"] for row in own) / len(own)
        deviation = math.sqrt(sum((row["reward"] - mean) ** 2 for row in own) / (len(own) - 1))
        expected = [(row["reward"] - mean) / (deviation + 1e-4) if deviation else 0.0 for row in own]
        assert [row["advantage"] for row in own] == pytest.approx(expected, abs=1e-4)


def test_what_else_was_measured_of_a_completion_that_lost_a_reward_is_recorded_and_trains_nothing():
    def judge(completions):
        if "lost" in completions:
            raise ConnectionError("judge is down")
        return [0.0, 1.0][: len(completions)]

    def style(completions):
        return [0.5] * len(completions)

    scorer, names = Scorer([judge, style]), ["judge", "style"]
    scored = with_advantages(scorer.score([group(["a", "b", "lost"])]), alg.grpo(), scorer.weights)
    table = rollouts.table_of(1, scored, names).to_pylist()
    assert [(row["reward"], row["reward/judge"], row["reward/style"]) for row in table][-1] == (None, None, 0.5)
    assert table[-1]["advantage"] == 0.0
    assert completions.table_of(1, scored, names).to_pylist()[-1]["style"] == 0.5
    assert shown_rows(scored, 2, None, False)[-1][2:4] == ("-", "0.50")
    last = evaluations.rows_of(scored, names, [1.0, 1.0])[-1]
    assert (last["reward"], last["reward/judge"], last["reward/style"]) == (None, None, 0.5)
    metrics = reward_metrics(scored, names, scorer.weights)
    assert (metrics["rewards/style/mean"].count, metrics["reward"].count) == (3, 2)
    (again,) = groups_of(table, names)
    assert again.rewards[-1].isnan().all()  # `covey why` judges it as the run did
