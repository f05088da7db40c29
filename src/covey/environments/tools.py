"""Tools: functions that a model may call while it writes, each with its JSON schema and its limits."""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from transformers.utils import get_json_schema

from covey.errors import ConfigError, did_you_mean, message_of

T = TypeVar("T")

_MARK = "__covey_tool__"
SECONDS = 30.0
"""Time limit of one call where a tool does not set its own."""
MAX_CHARACTERS = 20_000
"""Characters of a result where a tool does not set its own limit."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one call of a tool."""

    seconds: float = SECONDS
    max_characters: int = MAX_CHARACTERS
    """A longer result is cut, with a note that says so."""
    max_tokens: int | None = None
    """The same in tokens of the policy's tokenizer; None: `max_characters` alone."""
    isolated: bool = False
    """Run in a worker process of its own, killed past the time limit."""
    max_memory: int | None = None
    """Bytes that a call of an isolated tool may allocate; None: no limit."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call by `name`, with the JSON schema that the chat template shows to the model."""

    name: str
    call: Callable[..., Any]
    schema: Mapping[str, Any]
    """`{"type": "function", "function": {"name", "description", "parameters"}}`, as chat templates take it."""
    limits: Limits = field(default_factory=Limits)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.call)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of each parameter, by name."""
        properties: Mapping[str, Any] = self.schema["function"].get("parameters", {}).get("properties", {})
        return properties

    def problem_with(self, arguments: Any) -> str | None:
        """A sentence for the model where `arguments` do not fit the signature; None where they do."""
        if not isinstance(arguments, Mapping):
            return f"the arguments of {self.name} must be a JSON object, not {type(arguments).__name__}"
        names = list(self.parameters)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(self.call).parameters.values())
        unknown = [name for name in arguments if name not in names and not takes_any]
        if unknown:
            return f"{self.name} has no parameter {unknown[0]!r}; it takes {', '.join(names) or 'none'}"
        required = self.schema["function"].get("parameters", {}).get("required", [])
        missing = [name for name in required if name not in arguments]
        return f"{self.name} needs {', '.join(missing)}" if missing else None


def tool(
    *,
    timeout: float = SECONDS,
    max_characters: int = MAX_CHARACTERS,
    max_tokens: int | None = None,
    isolated: bool = False,
    max_memory: int | None = None,
) -> Callable[[T], T]:
    """Set the limits of a tool function; the function itself is unchanged.

    `timeout`: seconds of one call. `max_characters`, `max_tokens`: the longest result. `isolated`: call it in a worker
    process, which is killed past the time limit, for code that may hang or crash. `max_memory`: bytes that one call of an isolated
    tool may allocate.

    Example: `@tool(timeout=5)` above `def search(query: str) -> str`.
    """
    if not isinstance(timeout, int | float) or not timeout > 0:
        raise ConfigError(f"tool(timeout={timeout!r}) leaves no time; give seconds above 0.")
    if not isinstance(max_characters, int) or max_characters < 1:
        raise ConfigError(f"tool(max_characters={max_characters!r}) leaves no room for a result; give at least 1.")
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise ConfigError(f"tool(max_tokens={max_tokens!r}) leaves no room for a result; give at least 1.")
    if not isinstance(isolated, bool):
        raise ConfigError(f"tool(isolated={isolated!r}) must be True or False.")
    if max_memory is not None:
        _refuse_bad_memory(max_memory, isolated)
    limits = Limits(
        seconds=timeout, max_characters=max_characters, max_tokens=max_tokens, isolated=isolated, max_memory=max_memory
    )

    def mark(target: T) -> T:
        setattr(target, _MARK, limits)
        return target

    return mark


def _refuse_bad_memory(max_memory: Any, isolated: bool) -> None:
    if not isinstance(max_memory, int) or max_memory < 1:
        raise ConfigError(f"tool(max_memory={max_memory!r}) must be a whole number of bytes, such as 2**28.")
    if not isolated:
        raise ConfigError(
            f"tool(max_memory={max_memory}) needs isolated=True: the memory of a thread cannot be limited."
        )
    if not sys.platform.startswith("linux"):
        raise ConfigError(f"tool(max_memory={max_memory}) can be kept on Linux only; leave it out here.")


def tools_of(functions: Iterable[Any]) -> tuple[Tool, ...]:
    """Tools from functions (sync or async) with type hints and a docstring, or `Tool`s as they are.

    Raises ConfigError for what is not callable, has no hints or no description of a parameter, or has another's name.
    """
    if isinstance(functions, str | Mapping) or not isinstance(functions, Iterable):
        raise ConfigError(f"tools is a {type(functions).__name__}; give a list of functions.")
    tools = tuple(function if isinstance(function, Tool) else _tool_of(function) for function in functions)
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two tools have the name {name!r}; the model could not tell them apart. Rename one.")
    return tools


def _tool_of(function: Any) -> Tool:
    if not callable(function) or isinstance(function, type):
        raise ConfigError(
            f"tools has {function!r}, which is no function; give functions with type hints and a docstring."
        )
    name = getattr(function, "__name__", None) or type(function).__name__
    try:
        schema = get_json_schema(function)
    except Exception as error:  # its own parser of docstrings raises several kinds
        reason = message_of(error)
        raise ConfigError(
            f"tool {name!r} cannot be described to the model ({reason}); give every parameter a type hint and a line in an "
            "`Args:` section of its docstring."
        ) from error
    limits = getattr(function, _MARK, None) or Limits()
    return Tool(name=str(schema["function"]["name"]), call=function, schema=schema, limits=limits)


def bound(tools: Sequence[Tool], instance: Any) -> tuple[Tool, ...]:
    """The same tools as methods of `instance`."""
    return tuple(replace(tool, call=getattr(instance, tool.name)) for tool in tools)


def unknown_tool(name: str, tools: Iterable[Tool]) -> str:
    """A sentence for the model that called a tool that does not exist."""
    names = [tool.name for tool in tools]
    return f"there is no tool {name!r}.{did_you_mean(name, names)} Tools: {', '.join(names)}"
