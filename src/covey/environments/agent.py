"""Agents: a user's own loop over an OpenAI-compatible endpoint, `main(row, client, model)`, one call an episode."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from covey.errors import ConfigError, DataError
from covey.rewards.contract import is_async, name_of

OFFERED = ("row", "base_url", "client", "model", "api_key", "seed")
"""Arguments of `main` by name; it gets those that it has."""
_FIELDS = ("score", "answer", "turn_rewards", "trace")


@dataclass(frozen=True, kw_only=True)
class AgentResult:
    """Return value of an agent, taken apart."""

    score: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    """Score of each role of a game that the model plays against itself; its calls name theirs in the field `user`."""
    answer: str | None = None
    turn_rewards: tuple[float, ...] = ()
    trace: Sequence[Mapping[str, Any]] | None = None
    """Calls to train on; None: all that were recorded."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further values, which rewards receive by name."""

    @staticmethod
    def of(result: Any) -> AgentResult:
        """From nothing, a number, a text, or a mapping. Raises DataError for anything else."""
        if result is None:
            return AgentResult()
        if isinstance(result, str):
            return AgentResult(answer=result)
        if isinstance(result, int | float):
            return AgentResult(score=_number(result, "a score"))
        if not isinstance(result, Mapping):
            raise DataError(
                f"the agent returned a {type(result).__name__}; return a score, an answer as text, None, or a dict with "
                f"any of {', '.join(_FIELDS)}."
            )
        answer, score, trace = result.get("answer"), result.get("score"), result.get("trace")
        if answer is not None and not isinstance(answer, str):
            raise DataError(f"the agent returned an answer that is a {type(answer).__name__}; return text.")
        if isinstance(trace, Mapping):
            trace = trace.get("turns")
        if trace is not None and not (isinstance(trace, Sequence) and all(isinstance(x, Mapping) for x in trace)):
            raise DataError("the agent returned a trace that is no list of turns, each a dict with its token ids.")
        roles = {str(role): _number(value, f"the score of {role}") for role, value in score.items()} if isinstance(score, Mapping) else {}  # fmt: skip
        turn_rewards = tuple(_number(reward, "a turn's reward") for reward in result.get("turn_rewards") or ())
        if turn_rewards and roles:
            raise DataError("the agent returned turn_rewards and a score for each role; leave one out.")
        return AgentResult(
            score=None if score is None or roles else _number(score, "a score"),
            scores=roles,
            answer=answer,
            turn_rewards=turn_rewards,
            trace=trace,
            columns={str(name): value for name, value in result.items() if name not in _FIELDS},
        )


def _number(value: Any, what: str) -> float:
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    raise DataError(f"the agent returned {value!r} as {what}; return a finite number.")


@dataclass(frozen=True)
class Agent:
    """A user's `main`, sync or async, and the arguments that it takes. Raises ConfigError for one that cannot be called."""

    main: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.main):
            raise ConfigError(f"agent is {self.main!r}; give a function main(row, client, model).")
        for parameter in self._parameters:
            is_left = parameter.default is parameter.empty and parameter.kind in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            )
            if parameter.kind is parameter.POSITIONAL_ONLY or (is_left and parameter.name not in OFFERED):
                raise ConfigError(
                    f"agent {self.name} has the parameter {parameter.name!r}, which nothing fills; it may take "
                    f"{', '.join(OFFERED)}, by name."
                )
        if self.takes("client") and importlib.util.find_spec("openai") is None:
            raise ConfigError(
                f"agent {self.name} takes a client, which needs openai: pip install 'covey[agents]', or take base_url."
            )

    @property
    def name(self) -> str:
        return name_of(self.main)

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.main).parameters.values())

    def takes(self, name: str) -> bool:
        """True if `main` has this argument by name."""
        return any(parameter.name == name for parameter in self._parameters)

    def __call__(self, **offered: Any) -> AgentResult:
        """Run one episode to its end, in this thread. `offered`: values of OFFERED, the client excepted, which is made here."""
        accepted = {name: value for name, value in offered.items() if self.takes(name)}
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters):
            accepted = dict(offered)
        if not is_async(self.main):
            if not self.takes("client"):
                return AgentResult.of(self.main(**accepted))
            client = _client().with_options(base_url=offered["base_url"], api_key=offered["api_key"])
            return AgentResult.of(self.main(**{**accepted, "client": client}))
        return AgentResult.of(asyncio.run(self._awaited(accepted, offered)))

    async def _awaited(self, accepted: Mapping[str, Any], offered: Mapping[str, Any]) -> Any:
        if not self.takes("client"):
            return await self.main(**accepted)
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=offered["base_url"], api_key=offered["api_key"]) as client:
            return await self.main(**{**accepted, "client": client})


@functools.cache
def _client() -> Any:
    """One client for all threads: each has its address, all have its connections."""
    from openai import OpenAI

    return OpenAI(base_url="http://127.0.0.1", api_key="none")


def agent_reward(agent: Agent, is_alone: bool) -> Callable[..., Any]:
    """The reward that hands on the scores of an agent, by its name. `is_alone`: without a score there would be none at all."""

    def reward(agent_score: Sequence[float | None], **columns: Any) -> list[float | None]:
        if is_alone and all(score is None for score in agent_score):
            raise DataError(
                f"agent {agent.name} returned no score, or max_completion_length ended each episode before it could, and there is no "
                "other reward; return a number, give longer episodes, or give reward_funcs."
            )
        return list(agent_score)

    reward.__name__ = agent.name
    return reward
