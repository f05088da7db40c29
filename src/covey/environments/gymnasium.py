"""Gymnasium environments as environments of a run (extra `gymnasium`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey.environments.stepping import Stepped, as_text
from covey.errors import ConfigError, needed
from covey.models import first_line


def gymnasium_environment(
    make: str | Callable[[], Any], actions: Sequence[str] = (), description: str = "Take an action.", **options: Any
) -> Callable[[], Stepped]:
    """A factory for `environment_factory` from a Gymnasium id, or a function that makes an environment.

    The model calls `step(action=...)`: one of `actions`, which name a Discrete space's numbers in order, a number of it, or the
    text of a Text space. Environments rendered as text (`render_mode="ansi"`) are shown so. `options` go to `gymnasium.make`.
    Raises ConfigError for an id that is not registered and for other action spaces.
    """

    def factory() -> Stepped:
        environment = _Gymnasium(_make(make, options), tuple(actions))
        return Stepped(environment, environment.parameters, description, environment.show)

    return factory


class _Gymnasium:
    def __init__(self, env: Any, actions: tuple[str, ...]) -> None:
        self.env, self.actions = env, actions
        self.parameters = {"type": "object", "properties": {"action": self._schema()}, "required": ["action"]}

    def reset(self, seed: int) -> Any:
        return self.env.reset(seed=seed)[0]

    def step(self, action: Mapping[str, Any]) -> tuple[Any, float, bool]:
        observation, reward, is_terminated, is_truncated, _ = self.env.step(self._taken(action["action"]))
        return observation, float(reward), bool(is_terminated or is_truncated)

    def close(self) -> None:
        self.env.close()

    def show(self, observation: Any) -> Any:
        if getattr(self.env, "render_mode", None) == "ansi":
            return str(self.env.render())
        return as_text(observation)

    def _schema(self) -> dict[str, Any]:
        space, kind = self.env.action_space, type(self.env.action_space).__name__
        if kind == "Text":
            return {"type": "string", "description": "The action."}
        if kind != "Discrete":
            raise ConfigError(
                f"{self.env} has actions of the space {space}, which a tool cannot take; wrap it with Discrete or Text actions."
            )
        if not self.actions:
            last = int(space.start + space.n - 1)
            return {"type": "integer", "minimum": int(space.start), "maximum": last, "description": "The action."}
        if len(self.actions) != space.n:
            raise ConfigError(
                f"{self.env} has {space.n} actions, and {len(self.actions)} names were given; give one for each."
            )
        return {"type": "string", "enum": list(self.actions), "description": "The action."}

    def _taken(self, action: Any) -> Any:
        """The environment's own action; raises ValueError with a sentence for the model."""
        space = self.env.action_space
        if self.actions:
            if action not in self.actions:
                raise ValueError(f"{action!r} is no action; take one of {', '.join(self.actions)}")
            return int(space.start) + self.actions.index(action)
        taken = action if type(space).__name__ == "Text" else int(action)
        if not space.contains(taken):
            raise ValueError(f"{action!r} is not in {space}")
        return taken


def _make(make: str | Callable[[], Any], options: Mapping[str, Any]) -> Any:
    if not isinstance(make, str):
        return make(**options)
    with needed("Gymnasium environments need gymnasium", "gymnasium"):
        import gymnasium
    try:
        return gymnasium.make(make, **options)
    except gymnasium.error.Error as error:
        raise ConfigError(f"gymnasium cannot make {make!r}: {first_line(error)}") from error
