"""Environments of the library verifiers (Prime Intellect, 0.1) as agents of a run: their rollout and rubric, unmodified."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from covey.data.verifiers import environment
from covey.errors import ConfigError, DataError


def verifiers_agent(source: Any, **options: Any) -> Callable[..., Awaitable[dict[str, Any]]]:
    """An agent for `GRPOTrainer(agent=...)` from an environment, or a name with options for `verifiers.load_environment`.

    Each episode is the environment's own `run_rollout` against the run's endpoint (turns, tools, stop conditions), and its score
    the rubric's reward; the rubric's metrics reach further rewards by name. Draws use the run's sampling options.
    Raises ConfigError where the rubric compares a group of rollouts, since episodes are scored one at a time.
    """
    made = environment(source, **options) if isinstance(source, str) else source
    if getattr(made, "requires_group_rollouts", False):
        raise ConfigError(
            f"the verifiers environment {made.env_id or made!r} scores whole groups of rollouts, and a run's agents are scored one at "
            "a time; give it a rubric of single rollouts."
        )
    from verifiers.clients import OpenAIChatCompletionsClient

    async def main(row: Mapping[str, Any], client: Any, model: str) -> dict[str, Any]:
        done = await made.run_rollout(dict(row), OpenAIChatCompletionsClient(client), model, {})
        if done.get("error") is not None:
            error = done["error"]
            chain = error.get("error_chain_repr") if isinstance(error, Mapping) else error
            raise DataError(f"the environment's rollout failed: {' '.join(str(chain).split())[:500]}")
        return {**(done.get("metrics") or {}), "score": done["reward"]}

    main.__name__ = made.env_id or "verifiers"
    return main
