"""Texts in batches: of like length, bounded once memory ran out, each read once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from covey.errors import MemoryLimitError
from covey.rewards import ModelReward, RewardSpec, Scorer
from covey.rewards.adaptive_batches import AdaptiveBatches
from kit import tiny_reward_model, tiny_tokenizer

LENGTHS = [9, 2, 30, 4, 4, 11, 7, 1, 0, 30]


class Memory:
    """Reads texts as long as a batch has no more than `room` tokens with padding."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.sizes: list[int] = []

    def read(self, held: list[int]) -> Tensor:
        if len(held) * max(LENGTHS[i] for i in held) > self.room:
            raise MemoryError
        self.sizes.append(len(held))
        return torch.tensor([float(i) for i in held])


def places(portions: AdaptiveBatches, memory: Memory) -> list[int]:
    found = list(portions.run(LENGTHS, memory.read))
    assert [values.tolist() for _, values in found] == [held for held, _ in found]
    return [place for held, _ in found for place in held]


def test_each_text_is_read_once_the_shortest_first() -> None:
    memory = Memory(1000)
    assert places(AdaptiveBatches("m", 4), memory) == sorted(range(10), key=lambda i: LENGTHS[i])
    assert memory.sizes == [4, 4, 2]


def test_after_memory_ran_out_batches_are_smaller_for_good_and_short_texts_still_go_together() -> None:
    portions, memory = AdaptiveBatches("m", 8), Memory(40)
    assert sorted(places(portions, memory)) == list(range(10))
    assert [event.kind for event in portions.take_events()] == ["out_of_memory"] * 2
    memory.sizes.clear()
    assert sorted(places(portions, memory)) == list(range(10))
    assert memory.sizes == [5, 2, 1, 1, 1]
    assert portions.take_events() == ()


def test_a_text_that_does_not_fit_alone_is_told_with_its_length() -> None:
    with pytest.raises(MemoryLimitError, match="a text of 30 tokens does not fit in memory with 'm', even alone"):
        places(AdaptiveBatches("m", 8), Memory(29))


def test_what_else_goes_wrong_is_raised_as_it_is() -> None:
    def read(held: list[int]) -> Tensor:
        raise RuntimeError("shapes")

    portions = AdaptiveBatches("m", 8)
    with pytest.raises(RuntimeError, match="shapes"):
        list(portions.run(LENGTHS, read))
    assert portions.max_tokens is None


def test_a_scorer_keeps_the_bound_and_the_smaller_one_wins() -> None:
    def scorer() -> tuple[Scorer, AdaptiveBatches]:
        reward = ModelReward.of(tiny_reward_model(), tiny_tokenizer())
        return Scorer([RewardSpec(name="own", call=reward)]), reward.portions

    first, bound = scorer()
    assert "portions" not in first.state_dict()
    bound.max_tokens = 100
    later, resumed = scorer()
    later.load_state_dict(first.state_dict())
    assert resumed.max_tokens == 100
    resumed.max_tokens = 50
    later.load_state_dict(first.state_dict())
    assert resumed.max_tokens == 50
