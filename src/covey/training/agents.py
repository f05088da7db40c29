"""Agents of a run: tools, environments or a rollout function, checked before the model loads, and the sampler over them."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from covey.data.prompts import to_prompt
from covey.environments import (
    Agent,
    EnvironmentPool,
    EpisodeLimits,
    Episodes,
    EpisodeSampler,
    RolloutFuncSampler,
    Template,
    Tool,
    agent_reward,
    gymnasium_environment,
    harbor_environment,
    mcp_tools,
    openenv_environment,
    tools_of,
    verifiers_agent,
)
from covey.errors import ConfigError
from covey.names import load
from covey.process.sharding import Shards
from covey.rollout import GatheredSampler, Sampler, TokenSampler
from covey.types import Group, Message, Prompt

if TYPE_CHECKING:
    from covey.serving import Trace

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """Limits of episodes and of an agent's loop, and the record of its traces."""

    chat_template_kwargs: Any
    max_tokens: int
    """Tokens of a completion."""
    max_turns: int | None
    """Turns with tool calls of an episode."""
    episode_seconds: float | None
    agent_seconds: float
    concurrency: int
    """Loops of an agent that run at a time."""
    record: Callable[[int, Sequence[Trace]], None]
    """Called with the version of the weights and the traces of a rollout."""
    processor: Any = None
    """Processor of a model that reads images or sounds."""
    may_fail: bool = False
    """True if the run goes on where an agent loses all episodes of a rollout."""


@dataclass(frozen=True, eq=False)
class Agents:
    """Tools, environments and the rollout function that a user gave to `GRPOTrainer`."""

    tools: tuple[Tool, ...] = ()
    environments: EnvironmentPool | None = None
    rollout_func: Callable[..., Any] | None = None
    agent: Agent | None = None
    """A loop of the user's own over the run's endpoint."""
    has_single_completions: bool = False
    """True if no two completions share a prompt, so that the learner packs rows without padding regardless."""

    @staticmethod
    def of(tools: Any, environment_factory: Any, rollout_func: Any, agent: Any = None) -> Agents:
        """Agents from TRL's arguments; each function may be an import path. Raises ConfigError for unusable ones."""
        tools = [tool for spec in tools for tool in _tools(spec)] if isinstance(tools, (list, tuple)) else tools
        if isinstance(environment_factory, dict):
            environment_factory = {name: environment(spec) for name, spec in environment_factory.items()}
        environment_factory = environment(environment_factory)
        rollout_func = _loaded(rollout_func, "rollout function")
        if rollout_func is not None and (tools or environment_factory):
            other = "tools" if tools else "environment_factory"
            raise ConfigError(
                f"rollout_func writes whole completions itself, so {other} would never act; leave one out."
            )
        if rollout_func is not None and not callable(rollout_func):
            raise ConfigError(f"rollout_func is {rollout_func!r}; give a function of (prompts, trainer).")
        if agent is not None and (tools or environment_factory or rollout_func):
            other = "tools" if tools else "environment_factory" if environment_factory else "rollout_func"
            raise ConfigError(
                f"an agent calls its tools itself and writes whole episodes, so {other} would never act; leave one out."
            )
        made = None if agent is None else Agent(_agent(agent))
        pool = None if environment_factory is None else EnvironmentPool(environment_factory)
        return Agents(tools_of(tools or ()), pool, rollout_func, made)

    @property
    def are_used(self) -> bool:
        return bool(self.features)

    @property
    def have_turns(self) -> bool:
        """True if tools or environments may answer a completion that ends."""
        return bool(self.tools) or self.environments is not None

    @property
    def reads_rows(self) -> bool:
        """True if episodes read the columns of their rows."""
        return self.environments is not None or self.agent is not None

    @property
    def features(self) -> list[str]:
        """Names of what is used, as `covey.config.combinations` has them."""
        used = {
            "tools": bool(self.tools),
            "environment": self.environments is not None,
            "rollout_func": self.rollout_func is not None,
            "agent": self.agent is not None,
        }
        return [name for name, is_used in used.items() if is_used]

    @property
    def rewards(self) -> list[Callable[..., Any]]:
        """Reward functions of environments that score their own episodes."""
        return [] if self.environments is None else self.environments.rewards

    def environment_rewards(self, is_alone: bool) -> list[Callable[..., Any]]:
        """Rewards of environments and the scores of an agent; `is_alone`: no other reward is given."""
        return self.rewards if self.agent is None else [agent_reward(self.agent, is_alone)]

    def columns(self, dataset_columns: Sequence[str] | None) -> list[str] | None:
        """Columns that rewards receive, including `dataset_columns`; None while these are unknown."""
        if dataset_columns is None or self.rollout_func is not None or self.agent is not None:
            return None
        return [*dataset_columns, *(["environments"] if self.environments is not None else [])]

    def template_options(self, chat_template_kwargs: Any) -> dict[str, Any]:
        """Keyword arguments of the chat template: those of the run, and the schemas of tools for every prompt."""
        chosen = chat_template_kwargs if isinstance(chat_template_kwargs, dict) else {}
        shown = list(self.tools)
        if self.environments is not None and None in self.environments.tools:
            shown += self.environments.tools[None]
        return {**chosen, **({"tools": [tool.schema for tool in shown]} if shown else {})}

    def sampler(
        self,
        make: Callable[..., TokenSampler],
        options: AgentOptions,
        tokenizer: Any,
        eos_ids: Sequence[int],
        trainer: Any,
        is_ahead: bool = False,
    ) -> Sampler:
        """The sampler built by `make(environment=...)`; it generates episodes if there are tools or environments.

        `is_ahead`: rollouts are written before the one before them is scored.
        """
        if self.rollout_func is not None:
            return RolloutFuncSampler(make(), self.rollout_func, trainer, tokenizer, eos_ids)
        if self.agent is not None:
            return agent_sampler(make(), self.agent, options)
        if not self.are_used:
            return make()
        template = self.template_options(options.chat_template_kwargs)
        limits = EpisodeLimits(turns=options.max_turns, seconds=options.episode_seconds)
        theirs = getattr(options.processor, "chat_template", None)  # it may not be the tokenizer's
        spoken = template if theirs is None else {"chat_template": theirs, **template}
        episodes = Episodes(Template(tokenizer, eos_ids, spoken, processor=options.processor), self.tools, limits)

        def encode(messages: Sequence[Message], prompt: Prompt, tools: Sequence[Tool]) -> Prompt:
            shown = [tool.schema for tool in (*self.tools, *tools)]
            row, how = {**prompt.columns, "prompt": messages}, {**template, **({"tools": shown} if shown else {})}
            encoded = to_prompt(row, prompt.uid, f"prompt {prompt.uid}", tokenizer, how, options.processor, {})
            return replace(encoded, columns=prompt.columns, tools=tuple(shown))

        return EpisodeSampler(lambda hook: make(environment=hook), episodes, self.environments, encode, is_ahead)

    def driven(
        self, drives: Callable[..., Sampler], over: Callable[..., Any], model: Any, shards: Shards | None
    ) -> Sampler:
        """The sampler that `drives` makes of those of `over(model)`, whose weights are gathered from `shards`."""
        if shards is None:
            return drives(partial(over, model))
        if self.agent is not None:  # calls are answered in the midst of a rollout
            return GatheredSampler(shards, lambda model: drives(partial(over, model)))
        return drives(lambda **more: GatheredSampler(shards, lambda model: over(model, **more)))

    def of_member(self) -> Agents:
        """The same for another model of the run, with instances of the environments of its own, which it resets at other times."""
        pool = self.environments
        return self if pool is None else replace(self, environments=pool.sibling())

    def close(self) -> None:
        """Close the environments, of members too."""
        if self.environments is not None:
            self.environments.close()

    def forget(self, groups: Sequence[Group]) -> None:
        """Release what groups hold that are scored, or dropped."""
        if self.environments is not None:
            self.environments.release_of(groups)


def agent_sampler(sampler: TokenSampler, agent: Agent, options: AgentOptions) -> Sampler:
    """The sampler of a run whose completions an agent writes. Raises ConfigError where what it needs is missing."""
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"an agent talks to the run's endpoint, which needs {name}: pip install 'covey[agents]'.")
    from covey.serving import AgentSampler

    return AgentSampler(
        sampler,
        agent,
        max_tokens=options.max_tokens,
        max_turns=None if options.max_turns is None else options.max_turns + 1,
        timeout_seconds=options.agent_seconds,
        concurrency=options.concurrency,
        record=options.record,
        may_fail=options.may_fail,
        processor=options.processor,
    )


def environment(spec: Any) -> Any:
    """An environment factory, unchanged or loaded from text: `file.py:Class`, `openenv:URL`, `gymnasium:ID`, `harbor:FOLDER`."""
    kind, _, rest = spec.partition(":") if isinstance(spec, str) else ("", "", "")
    by_kind: dict[str, Callable[[str], Any]] = {
        "openenv": openenv_environment,
        "gymnasium": gymnasium_environment,
        "harbor": harbor_environment,
    }
    return by_kind[kind](rest) if kind in by_kind else _loaded(spec, "environment")


def _agent(spec: Any) -> Any:
    """A user's loop, unchanged or loaded from text: `file.py:main`, `verifiers:NAME`."""
    if isinstance(spec, str) and spec.startswith("verifiers:"):
        return verifiers_agent(spec.removeprefix("verifiers:"))
    return _loaded(spec, "agent")


def _tools(spec: Any) -> list[Any]:
    """Tools: a function unchanged, or from text: `file.py:function`, or all tools of an MCP server as `mcp:COMMAND` or `mcp:URL`."""
    if isinstance(spec, str) and spec.startswith("mcp:"):
        return list(mcp_tools(spec.removeprefix("mcp:")))
    return [_loaded(spec, "tool")]


def _loaded(spec: Any, kind: str) -> Any:
    return load(spec, kind) if isinstance(spec, str) else spec


def with_prompts(dataset: Any, agents: Agents, *, max_steps: int, num_rows: int) -> Any:
    """The data set with a column `prompt`, empty if an environment's `reset` writes it; `num_rows` generated rows without a data set.

    Raises ConfigError without a data set if there are several environments or no `max_steps`.
    """
    empty = [{"role": "user", "content": ""}]
    if agents.environments is None and (agents.agent is None or dataset is None):
        return dataset
    if dataset is not None:
        has_prompt = "prompt" in (getattr(dataset, "column_names", None) or ["prompt"])
        return dataset if has_prompt else dataset.add_column("prompt", [empty] * len(dataset))
    assert agents.environments is not None  # an agent without a data set was refused above
    if None not in agents.environments.factories:
        raise ConfigError(
            "environment_factory has several environments, which needs a train_dataset whose column environment names one "
            "for each row."
        )
    if max_steps <= 0:
        raise ConfigError("without a train_dataset the length of training is not known; set max_steps.")
    from datasets import Dataset

    return Dataset.from_list([{"prompt": empty} for _ in range(num_rows)])


def with_environment_rewards(reward_funcs: Any, processing_classes: Any, agents: Agents) -> tuple[Any, Any]:
    """Rewards and their tokenizers, followed by the environments' own rewards with weight 1 each."""
    environment_rewards = agents.environment_rewards(reward_funcs is None or reward_funcs == [])
    if not environment_rewards:
        return reward_funcs, processing_classes
    many = (
        []
        if reward_funcs is None
        else list(reward_funcs)
        if isinstance(reward_funcs, (list, tuple))
        else [reward_funcs]
    )
    if not isinstance(processing_classes, (list, tuple)):
        processing_classes = [processing_classes] * len(many)
    return [*many, *environment_rewards], [*processing_classes, *([None] * len(environment_rewards))]
