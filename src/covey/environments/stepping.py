"""Environments with `reset`, `step` and `close`, as TRL's environments: one tool is the step, rewards add up to the episode's."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from covey.environments.contents import content_of


class SteppedEnvironment(Protocol):
    """The protocol of environments that are stepped, after Gymnasium's. One instance is one session; several live at once."""

    def reset(self, seed: int) -> Any:
        """Begin an episode; the first observation."""

    def step(self, action: Mapping[str, Any]) -> tuple[Any, float, bool]:
        """(observation, reward of this turn, True if the episode is over). An exception becomes the tool's answer to the model."""

    def close(self) -> None:
        """End the session."""


class Stepped:
    """TRL's contract around a stepped environment: `reset` gives the first observation, the tool `step` every other one.

    `parameters`: JSON schema of an action, whose properties are the tool's parameters. `show` turns an observation into text.
    """

    def __init__(
        self,
        environment: SteppedEnvironment,
        parameters: Mapping[str, Any],
        description: str,
        show: Callable[[Any], Any] | None = None,
    ) -> None:
        self.environment, self.show = environment, show or as_text
        schema = {"name": "step", "description": description, "parameters": dict(parameters)}
        self.tool_schemas = {"step": {"type": "function", "function": schema}}
        self.turn_rewards: list[float] = []
        """Reward of each turn, so far."""
        self.is_over = False

    def reset(self, seed: int = 0, **row: Any) -> Any:
        """Begin an episode. `seed`: the row's column, or a number drawn from the prompt, the same for its whole group."""
        self.turn_rewards, self.is_over = [], False
        return self.show(self.environment.reset(int(seed)))

    def step(self, **action: Any) -> Any:
        """Take an action."""
        if self.is_over:
            raise RuntimeError("the episode is over")
        observation, reward, self.is_over = self.environment.step(action)
        self.turn_rewards.append(float(reward))
        return self.show(observation)

    def get_reward(self) -> float:
        """Sum of the turns' rewards."""
        return sum(self.turn_rewards)

    def close(self) -> None:
        self.environment.close()


def as_text(observation: Any) -> Any:
    """An observation as the model reads it: text, images and parts with media as they are, the only text of a mapping, else JSON."""
    content = content_of(observation, has_numbers=True)
    if isinstance(observation, str) or not isinstance(content, str):
        return content
    if isinstance(observation, Mapping):
        filled = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
        texts = [value for value in filled.values() if isinstance(value, str)]
        if len(filled) == 1 and texts:
            return texts[0]
        observation = filled
    return json.dumps(observation, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    """Arrays and numbers of numpy."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
