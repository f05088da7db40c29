"""Environments for the tests of adapters."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium


class Corridor(gymnasium.Env[int, int]):
    """Walk right three times; the start is drawn from the seed."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"]}

    def __init__(self, render_mode: str | None = None) -> None:
        self.action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = gymnasium.spaces.Discrete(12)
        self.render_mode = render_mode
        self.place = self.start = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = self.start = int(self.np_random.integers(0, 8))
        return self.place, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.place += 1 if action == 1 else -1
        is_there = self.place == self.start + 3
        return self.place, float(is_there), is_there, abs(self.place - self.start) > 4, {}

    def render(self) -> str:
        return f"You stand at {self.place}."


class Careless:
    """Everything that an environment can do wrong at once."""

    count = 0

    def reset(self, **row: Any) -> str:
        Careless.count += 1
        return f"Visit {Careless.count}."

    def look(self) -> str:
        """Look around."""
        raise RuntimeError("too dark")

    def get_reward(self) -> float:
        return 1.0


class Shared:
    """Sessions that share their state through the class."""

    total = 0

    def reset(self, **row: Any) -> str:
        Shared.total = 0
        return "Zero."

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: The number.
        """
        Shared.total += number
        return str(Shared.total)
