"""Environments by TRL's contract: a factory makes instances with `reset`, methods that are tools, and `get_reward`."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from zlib import crc32

from covey.data.media import items_of
from covey.data.prompts import behind_last_user
from covey.environments.tools import Tool, bound, tools_of
from covey.errors import ConfigError, CoveyError, DataError, did_you_mean
from covey.rewards.decorators import call_options_of, mark
from covey.types import Group, Message, Prompt

logger = logging.getLogger(__name__)

Factory = Callable[[], Any]
Encode = Callable[[Sequence[Message], Prompt, Sequence[Tool]], Prompt]
"""(messages, prompt, tools of its environment) -> the prompt with these messages, encoded with the images and sounds of its row."""
Observation = str | Sequence[Mapping[str, Any]] | None
"""Return value of `reset`: text, or parts of a message, such as images."""
_NOT_TOOLS = frozenset({"reset", "get_reward", "close"})


@dataclass(frozen=True)
class Reset:
    """An instance that was reset for one completion, and its methods as tools."""

    instance: Any
    tools: tuple[Tool, ...]
    again: Callable[[], Any]
    """Resets it once more with the same row."""


class EnvironmentPool:
    """Instances of environments, made once and reset for every completion, in any thread.

    `factories`: one factory, or a mapping of names to factories; then the column `environment` of a row names its own.
    Raises ConfigError for a factory that fails, an instance without `reset`, or a method without type hints and docstring.
    """

    def __init__(self, factories: Factory | Mapping[Any, Factory]) -> None:
        named: Mapping[Any, Factory] = factories if isinstance(factories, Mapping) else {None: factories}
        self.factories: dict[str | None, Factory] = dict(named)
        self.tools: dict[str | None, tuple[Tool, ...]] = {}
        self._idle: dict[str | None, list[Any]] = {}
        self._busy: dict[int, tuple[str | None, Any]] = {}
        """Instances whose episodes run, or are not scored yet, by identity."""
        self._kinds: list[type] = []
        self._siblings: list[EnvironmentPool] = []
        for name, factory in self.factories.items():
            instance = _make(factory, name)
            self.tools[name], self._idle[name] = _methods(instance, name), [instance]
            self._kinds.append(type(instance))

    @property
    def rewards(self) -> list[Callable[..., Any]]:
        """One reward function for each class of environment that has `get_reward`."""
        return [environment_reward(kind) for kind in dict.fromkeys(self._kinds) if hasattr(kind, "get_reward")]

    def reset(self, prompt: Prompt, n: int, encode: Encode) -> tuple[Prompt, list[Reset]]:
        """`n` instances reset with the row's columns, and the prompt with what `reset` returned after its last user message.

        A group has one prompt. Where `reset` says something else to another instance, copies of the first are taken.
        """
        prompt = prompt.before or prompt  # of a group that is drawn again, such as by another model
        name = self._name(prompt)
        instances = [self._take(name) for _ in range(n)]
        row = {**prompt.columns, "prompt": prompt.raw}
        if "seed" in inspect.signature(instances[0].reset).parameters:
            # one task for the group, another at each visit of the row
            row.setdefault("seed", crc32(prompt.uid.encode()))
        observations = [_reset(instance, row) for instance in instances]
        if any(not _is_same(observation, observations[0]) for observation in observations[1:]):
            others, instances[1:] = instances[1:], [_copy(instances[0]) for _ in instances[1:]]
            for other in others:
                self._busy.pop(id(other), None)
                _close(other)
            self._busy |= {id(instance): (name, instance) for instance in instances}
        shown = prompt
        # otherwise it is encoded with these tools already
        if observations[0] or prompt.media is None or name is not None:
            shown = _with_observation(prompt, observations[0], self.tools[name], encode)
            shown = replace(shown, before=prompt)
        return shown, [
            Reset(instance, bound(self.tools[name], instance), partial(_reset_again, instance, row, observations[0]))
            for instance in instances
        ]

    def release(self, instances: Iterable[Any]) -> None:
        """Make instances free for the next episodes: theirs are over, and scored."""
        for instance in instances:
            name, instance = self._busy.pop(id(instance), (None, None))
            if instance is not None:
                self._idle[name].append(instance)

    def release_of(self, groups: Iterable[Group]) -> None:
        """Make the instances of scored groups free."""
        completions = [completion for group in groups for completion in group.completions]
        self.release(completion.columns.get("environments") for completion in completions)

    def sibling(self) -> EnvironmentPool:
        """A pool of instances of its own, for another model of the run; it is closed with this one."""
        self._siblings.append(EnvironmentPool(self.factories))
        return self._siblings[-1]

    def close(self) -> None:
        """Call `close` of every instance that has one, and forget all; later episodes make new ones. An error of `close` is a warning."""
        self.release([instance for _, instance in self._busy.values()])
        for instances in self._idle.values():
            while instances:
                _close(instances.pop())
        while self._siblings:
            self._siblings.pop().close()

    def _name(self, prompt: Prompt) -> str | None:
        if None in self.factories:
            return None
        name = prompt.columns.get("environment")
        if name not in self.factories:
            names = [str(key) for key in self.factories]
            raise DataError(
                f"prompt {prompt.uid} has environment={name!r}, which environment_factory does not have."
                f"{did_you_mean(str(name), names)} It has {', '.join(names)}."
            )
        return str(name)

    def _take(self, name: str | None) -> Any:
        try:
            instance = self._idle[name].pop()  # of several threads: no look before
        except IndexError:
            instance = _make(self.factories[name], name)
        self._busy[id(instance)] = (name, instance)  # also while it is reset, which may fail
        return instance


def _close(instance: Any) -> None:
    if callable(getattr(instance, "close", None)):
        try:
            instance.close()
        except Exception as error:  # noqa: BLE001 - code of the user, after the work
            logger.warning("close() of %s failed: %s: %s", type(instance).__name__, type(error).__name__, error)


def environment_reward(kind: Any) -> Callable[..., Any]:
    """The reward that environments of this class give themselves; None for completions with another environment.

    `@reward(...)` above `get_reward` says how it is called; one that is `async` is called for all completions side by side.
    """
    options = call_options_of(kind.get_reward)
    if inspect.iscoroutinefunction(kind.get_reward):

        async def reward(environments: Sequence[Any], **columns: Any) -> list[float | None]:
            return [
                await environment.get_reward() if type(environment) is kind else None for environment in environments
            ]

        options = replace(options, unit="completion")
    else:

        def reward(environments: Sequence[Any], **columns: Any) -> list[float | None]:  # type: ignore[misc]
            return [environment.get_reward() if type(environment) is kind else None for environment in environments]

    reward.__name__ = kind.__name__
    return mark(reward, options)


def _with_observation(prompt: Prompt, observation: Observation, tools: Sequence[Tool], encode: Encode) -> Prompt:
    """The prompt with an observation after its last user message, encoded with the tools of its environment.

    Raises DataError for an image or a sound inside of the prompt's messages, which is not there to be encoded again.
    """
    messages: Sequence[Message] = prompt.messages or ()
    if observation:
        messages = behind_last_user(messages, observation)
    if not messages:
        return prompt
    items_of(prompt, "which cannot be encoded again with what reset() of its environment returns")
    return encode(messages, prompt, tools)


def _is_same(first: Any, other: Any) -> bool:
    """True for equal observations, arrays of pixels compared by value."""
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        return first.keys() == other.keys() and all(_is_same(first[name], other[name]) for name in first)
    if isinstance(first, list | tuple) and isinstance(other, list | tuple):
        return len(first) == len(other) and all(map(_is_same, first, other))
    if hasattr(first, "shape") and hasattr(other, "shape"):
        return bool(first.shape == other.shape and (first == other).all())
    return bool(first == other)


def _make(factory: Factory, name: str | None) -> Any:
    which = "environment_factory" if name is None else f"environment_factory[{name!r}]"
    if not callable(factory):
        raise ConfigError(
            f"{which} is {factory!r}, which is not callable; give a class, or a function that makes instances."
        )
    try:
        instance = factory()
    except CoveyError:  # which says itself what to do
        raise
    except Exception as error:
        raise ConfigError(
            f"{which}() raised {type(error).__name__}: {error}; it is called without arguments."
        ) from error
    if not callable(getattr(instance, "reset", None)):
        raise ConfigError(
            f"{which} makes a {type(instance).__name__} without reset(); define `def reset(self, **row)`."
        )
    return instance


def _methods(instance: Any, name: str | None) -> tuple[Tool, ...]:
    if isinstance(schemas := getattr(instance, "tool_schemas", None), Mapping):
        return tuple(
            Tool(name=method, call=getattr(instance, method), schema=schema) for method, schema in schemas.items()
        )
    members = inspect.getmembers(type(instance), predicate=inspect.isfunction)
    names = [method for method, _ in members if not method.startswith("_") and method not in _NOT_TOOLS]
    tools = tools_of(getattr(instance, method) for method in names)
    for tool in tools:
        if tool.limits.isolated:
            raise ConfigError(
                f"{type(instance).__name__}.{tool.name} is isolated, and would change a copy of its environment in another process; "
                "leave isolated=True out, or call an isolated function of your own in it."
            )
    return tools


def _reset(instance: Any, row: Mapping[str, Any]) -> Observation:
    parameters = inspect.signature(instance.reset).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    try:
        observation = instance.reset(**{name: value for name, value in row.items() if takes_all or name in parameters})
    except Exception as error:
        raise DataError(
            f"reset() of {type(instance).__name__} raised {type(error).__name__}: {error}; it gets the row's columns by name (in covey env check those of --row)."
        ) from error
    is_parts = isinstance(observation, list | tuple) and all(isinstance(part, Mapping) for part in observation)
    if observation is not None and not isinstance(observation, str) and not is_parts:
        raise DataError(
            f"reset() of {type(instance).__name__} returned {type(observation).__name__}; return text, None, or for an image a list "
            'of parts such as {"type": "image", "image": ...}.'
        )
    return observation  # type: ignore[no-any-return]


def _reset_again(instance: Any, row: Mapping[str, Any], shown: Observation) -> None:
    """Reset for a completion that is written once more. Raises DataError where that is not the task that its prompt shows."""
    if not _is_same(_reset(instance, row), shown):
        raise DataError(
            f"memory ran out, and reset() of {type(instance).__name__} gave another task than the one that a completion had begun with; draw "
            "the task from a column of the row, or from the argument `seed`."
        )


def _copy(instance: Any) -> Any:
    try:
        return copy.deepcopy(instance)
    except Exception as error:
        raise DataError(
            f"reset() of {type(instance).__name__} gave completions of one prompt different texts, and the instance cannot be "
            f"copied ({type(error).__name__}); draw the task from a column of the row, such as a seed, so that a group has one."
        ) from error
