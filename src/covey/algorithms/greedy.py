"""Greedy answers as the baseline of an estimator. ReMax, Li et al. 2023, <https://arxiv.org/abs/2310.10505>."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from covey.types import Group, Position, Prompt


def with_greedy_rewards(groups: Sequence[Group], answers: Sequence[Group]) -> list[Group]:
    """The groups with the rewards of their prompt's greedy answer, one of `answers` [P, 1], in any order."""
    by_prompt = {answer.prompt.uid: answer for answer in answers}
    rewards = [by_prompt[group.prompt.uid].rewards for group in groups]
    return [
        group if reward is None else replace(group, greedy_rewards=reward[0])
        for group, reward in zip(groups, rewards, strict=True)
    ]


@dataclass(frozen=True)
class GreedyBaseline:
    """Stage that gives each group the rewards of its prompt's greedy answer."""

    draw: Callable[[Sequence[Prompt]], Sequence[Group]]
    """Scored greedy answers to the prompts, one each."""
    phase: Literal["rollout"] = "rollout"

    def __call__(self, groups: Sequence[Group], position: Position) -> list[Group]:
        return with_greedy_rewards(groups, self.draw([group.prompt for group in groups]))
