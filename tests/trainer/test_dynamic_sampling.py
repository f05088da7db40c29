"""Groups without signal are replaced by others, a bounded number of times; curricula and mixtures drive real runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from covey import algorithms as alg
from covey.data import mix
from covey.rewards import Scorer
from covey.rewards.combining import Combiner
from covey.training.credit import with_advantages, with_signal_first, without_signal
from faults.small_runs import ROWS, lines, reward_len, trainer, weights
from kit import group

DULL = {f"Tom has {i} apples." for i in range(8)}
"""Two thirds of the prompts: every answer to them gets the same reward."""


def some_dull(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [
        0.0 if prompt in DULL else value
        for prompt, value in zip(prompts, reward_len(prompts, completions), strict=True)
    ]


def all_dull(completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.slow
def test_groups_without_signal_are_replaced_by_groups_with_it(tmp_path: Path):
    plain = trainer(tmp_path / "plain", reward_funcs=some_dull, max_steps=4)
    plain.train()
    dynamic = trainer(tmp_path / "dynamic", reward_funcs=some_dull, max_steps=4, dynamic_sampling=20)
    dynamic.train()
    before, after = lines(tmp_path / "plain"), lines(tmp_path / "dynamic")
    advantage = "advantages/zero_fraction"
    drawn = [line["groups/drawn"] for line in after if "groups/drawn" in line]
    assert sum(drawn) > 4 * 2  # more than a rollout's own two groups
    assert any(line.get("frac_reward_zero_std", 0) > 0 for line in before)
    assert not any(line.get(advantage) for line in after)
    # what is logged is of all that was drawn, so that the reward can be compared with a run that keeps such groups
    assert max(line.get("frac_reward_zero_std", 0) for line in after) > 0


def test_the_number_of_further_draws_is_bounded_and_the_batch_stays_whole(tmp_path: Path):
    run = trainer(tmp_path / "run", reward_funcs=all_dull, max_steps=2, dynamic_sampling=3)
    before = weights(run)
    run.train()
    logged = [line["groups/drawn"] for line in lines(tmp_path / "run") if "groups/drawn" in line]
    assert logged == pytest.approx([2 + 3 * 2] * len(logged))
    assert (weights(run) - before).abs().max() < 1e-6


def test_without_it_nothing_more_is_drawn(tmp_path: Path):
    trainer(tmp_path / "run", reward_funcs=all_dull, max_steps=2).train()
    assert {line["groups/drawn"] for line in lines(tmp_path / "run") if "groups/drawn" in line} == {2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dynamic_sampling": 4}, marks=pytest.mark.nightly),
        pytest.param({"curriculum": "frontier"}, marks=pytest.mark.nightly),
        {"curriculum": "frontier", "dynamic_sampling": 2},
    ],
)
def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(tmp_path: Path, options: dict[str, Any]):
    whole = trainer(tmp_path / "whole", reward_funcs=some_dull, max_steps=6, **options)
    whole.train()
    part = trainer(tmp_path / "part", reward_funcs=some_dull, max_steps=6, save_steps=3, **options)
    part.train()
    again = trainer(tmp_path / "part", reward_funcs=some_dull, max_steps=6, **options)
    with pytest.warns(UserWarning, match="goes on from step 3"):
        again.train(resume_from_checkpoint=str(tmp_path / "part" / "checkpoint-3"))
    assert bool((weights(whole) == weights(again)).all())


@pytest.mark.slow
def test_the_frontier_goes_where_the_signal_is(tmp_path: Path):
    seen: Counter[str] = Counter()

    def watched(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        seen.update(prompts[::4])
        return some_dull(prompts, completions)

    trainer(tmp_path / "run", reward_funcs=watched, max_steps=40, curriculum="frontier", save_strategy="no").train()
    dull = sum(count for prompt, count in seen.items() if prompt in DULL) / 8
    sharp = sum(count for prompt, count in seen.items() if prompt not in DULL) / 4
    assert sharp > 2 * dull > 0


def test_a_mixture_trains_and_tells_rewards_which_set_a_prompt_is_from(tmp_path: Path):
    data = mix({"few": Dataset.from_list(ROWS[:3]), "many": Dataset.from_list(ROWS[3:])}, {"few": 1, "many": 1})
    seen: Counter[str] = Counter()

    def watched(completions: list[str], dataset: list[str], **columns: Any) -> list[float]:
        seen.update(dataset)
        return [float(len(c)) for c in completions]

    made = trainer(tmp_path / "run", reward_funcs=watched, train_dataset=data, max_steps=4, save_strategy="no")
    made.train()
    assert seen["few"] == seen["many"] > 0
    seen.clear()
    made.evaluate(data)  # each row counts once
    assert seen["many"] / seen["few"] == (len(ROWS) - 3) / 3


def test_groups_without_signal_are_those_whose_advantages_are_all_zero():
    tied_raw = group(["a", "b"], uid="0:0", rewards=[[1.0, 0.0], [0.0, 2.0]])  # 1 x 1 = 0.5 x 2
    both_clipped = group(["a", "b"], uid="0:1", rewards=[[2.0, 0.0], [3.0, 0.0]])
    apart = group(["a", "b"], uid="0:2", rewards=[[0.0, 0.0], [1.0, 0.0]])
    groups, rewards = [tied_raw, both_clipped, apart], [all_dull, some_dull]
    summed, each = alg.grpo(), alg.grpo().replace(advantage=alg.NormalizeThenSum())
    for algorithm, options, expected in (
        (summed, {}, [True, False, False]),
        (each, {}, [False, False, False]),
        (summed, {"normalization": "group"}, [False, False, False]),
        (summed, {"clip": [0.0, 1.0]}, [False, True, False]),
    ):
        scorer = Scorer.of(rewards, [1.0, 0.5], combiner=Combiner(**options))
        judged = with_advantages(groups, algorithm, scorer.weights, scorer.combiner(groups))
        assert [not one.advantages.any() for one in judged] == expected
        assert without_signal(groups, scorer, algorithm) == expected
        order = with_signal_first(groups, scorer, algorithm)
        assert order == sorted(groups, key=lambda one: expected[groups.index(one)])
