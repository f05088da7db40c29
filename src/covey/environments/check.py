"""Examination of an environment before a run: its time, determinism, sessions, and the reward of random actions."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from covey.data.media import media_digest
from covey.environments.contents import content_of
from covey.environments.factory import EnvironmentPool, Reset
from covey.environments.tools import Tool
from covey.types import Message, Prompt

_ENDING_SECONDS = 1.0
"""Connections and processes end on the other side too."""
_WORDS = ("yes", "no", "hello", "1", "42", "look", "a", "")


@dataclass(frozen=True, kw_only=True)
class Walk:
    """One episode of random actions."""

    shown: tuple[str, ...]
    """Text of `reset` and of every call."""
    reward: float | None
    """None: the environment has no `get_reward`."""
    seconds: tuple[float, ...]
    """Seconds of `reset`, then of every call."""
    errors: tuple[str, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True, kw_only=True)
class EnvironmentReport:
    """Findings of an examination."""

    walks: tuple[Walk, ...]
    is_repeatable: bool
    """True if the same seed and actions gave the same texts and reward twice, one after the other."""
    are_apart: bool
    """True if two episodes in turns gave what each gives alone."""
    left: Mapping[str, int] = field(default_factory=dict)
    """Threads, child processes and open connections that are still there after `close`."""

    @property
    def reset_seconds(self) -> float:
        """Median of `reset`."""
        return statistics.median(walk.seconds[0] for walk in self.walks)

    @property
    def step_seconds(self) -> tuple[float, float]:
        """Median and largest of the calls; NaN without one."""
        every = [seconds for walk in self.walks for seconds in walk.seconds[1:]]
        return (statistics.median(every), max(every)) if every else (float("nan"), float("nan"))

    @property
    def rewards(self) -> list[float]:
        return [walk.reward for walk in self.walks if walk.reward is not None]

    @property
    def scored(self) -> float:
        """Share of random episodes that earned more than the least of them, or more than 0."""
        least = min([0.0, *self.rewards])
        return sum(reward > least for reward in self.rewards) / max(1, len(self.rewards))


def examine(
    factory: Callable[[], Any],
    *,
    episodes: int = 20,
    turns: int = 10,
    seed: int = 0,
    row: Mapping[str, Any] | None = None,
) -> EnvironmentReport:
    """Act at random in an environment of TRL's contract: `episodes` of at most `turns` calls, drawn from the tools' schemas.

    `row`: columns that `reset` receives. Raises what the factory and `reset` raise, as in a run.
    """
    before = _open_resources()
    pool = EnvironmentPool(factory)
    try:
        plans = [_plan(pool.tools[None], turns, f"{seed} {i}") for i in range(episodes)]
        walks = tuple(_walk(pool, [plan], seed + i, row or {})[0] for i, plan in enumerate(plans))
        again = _walk(pool, [plans[0]], seed, row or {})[0]
        apart = _walk(pool, [plans[0], plans[-1]], seed, row or {})
        alone = [again, _walk(pool, [plans[-1]], seed, row or {})[0]]
    finally:
        pool.close()
    ended = time.monotonic()
    while (left := _more_than(before)) and time.monotonic() - ended < _ENDING_SECONDS:
        time.sleep(0.02)
    return EnvironmentReport(
        walks=walks,
        is_repeatable=_same(walks[0], again),
        are_apart=all(_same(walk, other) for walk, other in zip(apart, alone, strict=True)),
        left=left,
    )


def _walk(
    pool: EnvironmentPool, plans: Sequence[Sequence[tuple[Tool, dict[str, Any]]]], seed: int, row: Mapping[str, Any]
) -> list[Walk]:
    """The walks of several sessions that are open together, one call each in turn."""
    columns = {"seed": seed, **row}
    empty = ({"role": "user", "content": ""},)
    prompts = [Prompt(uid=f"0:{i}", messages=empty, token_ids=(), columns=columns) for i in range(len(plans))]
    started = [time.perf_counter() for _ in plans]
    encode = lambda messages, prompt, tools: replace(prompt, messages=tuple(messages))
    begun = [pool.reset(prompt, 1, encode) for prompt in prompts]
    shown: list[list[str]] = [[_as_text((prompt.messages or ({},))[-1].get("content") or "")] for prompt, _ in begun]
    seconds = [[time.perf_counter() - since] for since in started]
    errors: list[list[str]] = [[] for _ in plans]
    messages: list[list[Message]] = [list(prompt.messages or ()) for prompt, _ in begun]
    sessions = [resets[0] for _, resets in begun]
    for turn in range(max(map(len, plans))):
        for k, plan in enumerate(plans):
            if turn >= len(plan) or getattr(sessions[k].instance, "is_over", False) is True:
                continue
            tool, arguments = plan[turn]
            since = time.perf_counter()
            text, error = _call(sessions[k], tool.name, arguments)
            seconds[k].append(time.perf_counter() - since)
            shown[k].append(text)
            errors[k] += [error] if error else []
            call = {"type": "function", "function": {"name": tool.name, "arguments": arguments}}
            messages[k].append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages[k].append({"role": "tool", "name": tool.name, "content": text})
    pool.release(session.instance for session in sessions)
    return [
        Walk(
            shown=tuple(shown[k]),
            reward=float(instance.get_reward()) if hasattr(instance := sessions[k].instance, "get_reward") else None,
            seconds=tuple(seconds[k]),
            errors=tuple(errors[k]),
            messages=tuple(messages[k]),
        )
        for k in range(len(plans))
    ]


def _as_text(content: Any) -> str:
    """A message's content, its images and sounds by their digests."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or media_digest(list(part.values()))) for part in content)


def _call(session: Reset, name: str, arguments: dict[str, Any]) -> tuple[str, str | None]:
    call = next(tool.call for tool in session.tools if tool.name == name)
    try:
        content = content_of(call(**arguments))
        return content if isinstance(content, str) else _as_text(content), None
    except Exception as error:  # noqa: BLE001 - any exception of a tool is its answer, as in a run
        return f"{type(error).__name__}: {error}", f"{name}: {type(error).__name__}: {error}"


def _plan(tools: Sequence[Tool], turns: int, seed: str) -> list[tuple[Tool, dict[str, Any]]]:
    """Calls drawn at random by the tools' schemas."""
    draw = random.Random(seed)
    plan = []
    for _ in range(turns if tools else 0):
        tool = draw.choice(list(tools))
        plan.append((tool, {name: _drawn(schema, draw) for name, schema in tool.parameters.items()}))
    return plan


def _drawn(schema: Mapping[str, Any], draw: random.Random) -> Any:
    if schema.get("enum"):
        return draw.choice(list(schema["enum"]))
    if "const" in schema:
        return schema["const"]
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return _drawn(options[0], draw)
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "integer":
        return draw.randint(int(schema.get("minimum", 0)), int(schema.get("maximum", 9)))
    if kind == "number":
        return draw.uniform(float(schema.get("minimum", 0)), float(schema.get("maximum", 9)))
    if kind == "array":
        return [_drawn(schema.get("items") or {}, draw) for _ in range(draw.randint(0, 3))]
    if kind == "object":
        return {name: _drawn(inner, draw) for name, inner in (schema.get("properties") or {}).items()}
    return draw.random() < 0.5 if kind == "boolean" else draw.choice(_WORDS)


def _same(walk: Walk, other: Walk) -> bool:
    return (walk.shown, walk.reward, walk.errors) == (other.shown, other.reward, other.errors)


def _more_than(before: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in _open_resources().items() if count > before[name]}


def _open_resources() -> dict[str, int]:
    process = psutil.Process()
    return {
        "threads": process.num_threads(),
        "child processes": len(process.children(recursive=True)),
        "connections": len(process.net_connections()),
    }
