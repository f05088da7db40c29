"""A completion that is begun again acts in the task that its prompt shows."""

import itertools

import numpy as np
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


class Pictured(Counting):
    """Shows a frame, as an array, with each task's text."""

    def reset(self, **row):
        return [{"type": "image", "image": np.full((2, 2, 3), 7, np.uint8)}, {"type": "text", "text": "task"}]


class Moving(Counting):
    def reset(self, **row):
        return [{"type": "image", "image": np.full((2, 2, 3), next(self.tasks), np.uint8)}]


def resets_of(factory):
    prompt = Prompt(uid="0:0", token_ids=(1,), messages=({"role": "user", "content": "Go: "},))
    return EnvironmentPool(factory).reset(prompt, 2, lambda messages, prompt, tools: prompt)[1]


def test_another_task_after_a_second_reset_is_named():
    for reset in (*resets_of(Fixed), *resets_of(Pictured)):
        reset.again()
    for reset in (*resets_of(Counting), *resets_of(Moving)):
        with pytest.raises(DataError, match="another task than the one"):
            reset.again()
