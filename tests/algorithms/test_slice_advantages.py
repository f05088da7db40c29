"""Advantages with a baseline by group and a scale by slice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset

from covey import algorithms as alg
from covey.errors import ConfigError
from covey.types import Scores
from faults.small_runs import lines, trainer
from kit import group


def scores(rewards: torch.Tensor, slices: tuple[str, ...]) -> Scores:
    groups = [
        group([""] * rewards.shape[1], rewards=row[:, None].tolist(), columns={"language": name})
        for row, name in zip(rewards, slices, strict=True)
    ]
    return Scores.of(groups, slice_column="language")


def rewards_of(prompts: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(prompts, 8, generator=torch.Generator().manual_seed(seed))


def test_one_slice_is_scaling_by_the_batch():
    found = scores(rewards_of(6), ("en",) * 6)
    torch.testing.assert_close(
        alg.SliceNormalized("language")(found), alg.GroupNormalized("batch")(found), rtol=0, atol=1e-7
    )


def test_a_slice_of_large_rewards_does_not_set_the_scale_of_another():
    """Rewards of German times 100 leave its advantages and those of English as they were."""
    rewards, slices = rewards_of(8), ("en", "de") * 4
    larger = rewards.clone()
    larger[1::2] *= 100
    part = alg.SliceNormalized("language", epsilon=0.0)
    torch.testing.assert_close(part(scores(larger, slices)), part(scores(rewards, slices)), rtol=1e-4, atol=1e-5)
    batch = alg.GroupNormalized("batch", epsilon=0.0)
    assert batch(scores(larger, slices))[0::2].abs().max() < 0.1 * batch(scores(rewards, slices))[0::2].abs().max()


def test_small_slices_are_pooled():
    rewards, slices = rewards_of(6), ("en", "en", "en", "de", "fr", "it")
    judged = alg.SliceNormalized("language", min_slice=24)(scores(rewards, slices))
    pool = rewards[3:]
    wanted = (pool - pool.mean(-1, keepdim=True)) / (pool.std() + 1e-4)
    torch.testing.assert_close(judged[3:], wanted, rtol=1e-5, atol=1e-6)
    everyone = alg.SliceNormalized("language", min_slice=1000)(scores(rewards, slices))
    torch.testing.assert_close(everyone, alg.GroupNormalized("batch")(scores(rewards, slices)), rtol=1e-5, atol=1e-6)


def test_unscored_and_tied_completions_get_nothing():
    rewards = rewards_of(4)
    rewards[0, 0], rewards[1] = float("nan"), 0.5
    judged = alg.SliceNormalized("language")(scores(rewards, ("en", "en", "de", "de")))
    assert judged[0, 0] == 0
    assert not judged[1].any()
    assert judged.isfinite().all()


def test_the_option_composes_it_and_what_contradicts_it_is_refused():
    assert alg.from_options(advantage_slices="language").advantage == alg.SliceNormalized("language")
    with pytest.raises(ConfigError, match=r"advantage_slices='language'.*scale_rewards='batch'"):
        alg.from_options(advantage_slices="language", scale_rewards="batch")


def test_a_run_uses_the_column_and_refuses_one_that_is_not_there(tmp_path: Path):
    rows = Dataset.from_list([{"prompt": f"{i}", "level": "even" if i % 2 else "odd"} for i in range(8)])
    trainer(tmp_path / "run", train_dataset=rows, max_steps=2, advantage_slices="level").train()
    assert len(lines(tmp_path / "run")) == 2
    with pytest.raises(ConfigError, match=r"advantage_slices names the column 'levle'.*level"):
        trainer(tmp_path / "other", train_dataset=rows, advantage_slices="levle")
