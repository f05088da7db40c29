"""A completion that is begun again acts in the task that its prompt shows."""

import itertools

import pytest

from covey.environments import EnvironmentPool
from covey.errors import DataError
from covey.types import Prompt


class Counting:
    """An environment with another task at each reset."""

    tasks = itertools.count()

    def reset(self, **row):
        self.task = next(self.tasks)
        return f"task {self.task}"


class Fixed(Counting):
    def reset(self, **row):
        return "task 1"


def resets_of(factory):
    prompt = Prompt(uid="0:0", token_ids=(1,), messages=({"role": "user", "content": "Go: "},))
    return EnvironmentPool(factory).reset(prompt, 2, lambda messages, prompt, tools: prompt)[1]


def test_another_task_after_a_second_reset_is_named():
    for reset in resets_of(Fixed):
        reset.again()
    for reset in resets_of(Counting):
        with pytest.raises(DataError, match="another task than the one"):
            reset.again()
