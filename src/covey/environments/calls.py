"""Calls of tools: side by side, each within its limits. A failure is the tool's answer to the model and never ends a run."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import psutil

from covey.data.media import Kind
from covey.environments.call_forms import readable
from covey.environments.contents import MediaReturnedError, content_of, limited, media_in, opened, sendable, text_of
from covey.environments.tools import Limits, Tool, unknown_tool
from covey.rewards.calling.deadline import DeadlineError, EventLoop, Lanes, settle
from covey.rewards.calling.workers import WorkerDied, WorkerError, WorkerPool
from covey.types import ToolCall

AT_ONCE = 64
"""Most calls that run at the same time."""


@dataclass(frozen=True)
class Request:
    """One call as the model wrote it. `tools` are those that its episode has."""

    name: str
    arguments: Any
    tools: Mapping[str, Tool]
    problem: str | None = None
    """Sentence for the model where the call could not be read at all."""


class ToolRunner:
    """Runs the calls of one decode step side by side: async tools on one event loop, others in threads or worker processes."""

    def __init__(
        self, tokenizer: Any = None, processor: Any = None, shows: Callable[[Kind], bool] = lambda kind: True
    ) -> None:
        """`tokenizer`: the policy's, in whose tokens results are limited. `processor`: of a model that reads media, whose chat template
        `shows` a modality in answers.
        """
        self.tokenizer, self.processor, self.shows = tokenizer, processor, shows
        self._loop = EventLoop()
        self._pools: dict[str, WorkerPool] = {}
        self._lanes = Lanes("tool", AT_ONCE)

    def run(self, requests: Sequence[Request]) -> list[ToolCall]:
        """The result of every call, in order. Raises nothing that a tool raises, but DataError for media that the model cannot be shown."""
        calls = [self._lanes.run(partial(self._call, request)) for request in requests]
        wait(calls)
        return [call.result() for call in calls]

    def close(self) -> None:
        """End the event loop, the threads and the worker processes."""
        self._loop.close()
        self._lanes.close()
        for pool in self._pools.values():
            pool.close()

    def _call(self, request: Request) -> ToolCall:
        started = time.perf_counter()
        tool = request.tools.get(request.name)
        problem = request.problem
        if problem is None:
            problem = (
                unknown_tool(request.name, request.tools.values())
                if tool is None
                else tool.problem_with(request.arguments)
            )
        if problem is not None or tool is None:
            return _failed(request, "error", problem or "", started)
        try:
            content = content_of(self._value(tool, dict(request.arguments)))
            parts = () if isinstance(content, str) else tuple(self._read(tool, content))
        except MediaReturnedError:
            raise
        except DeadlineError:
            sentence = f"{tool.name} did not answer within {tool.limits.seconds:g} seconds"
            return _failed(request, "timeout", sentence, started)
        except (WorkerError, WorkerDied) as error:
            kind = error.kind if isinstance(error, WorkerError) else "its process ended"
            if kind == MediaReturnedError.__name__:  # its class is lost on the way from the worker
                raise MediaReturnedError(str(error)) from error
            return _failed(request, "error", f"{kind}: {error}" if str(error) else kind, started)
        except BaseException as error:  # noqa: BLE001 - any exception of a tool is its answer
            return _failed(request, "error", f"{type(error).__name__}: {error}", started)
        return ToolCall(
            name=tool.name,
            arguments=request.arguments,
            result=self._within(tool.limits, content) if isinstance(content, str) else text_of(parts),
            status="ok",
            seconds=time.perf_counter() - started,
            parts=parts,
        )

    def _read(self, tool: Tool, content: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The parts of an answer, their media opened. Raises MediaReturnedError for a modality that the model is not shown."""
        for kind in media_in(content, tool.name):
            if self.processor is None or not kind.is_read_by(self.processor):
                lack = "the model or its processor does not read; give a model that does"
            elif not self.shows(kind):
                lack = "the chat template leaves out of a tool's answer; set another tokenizer.chat_template"
            else:
                continue
            raise MediaReturnedError(
                f"tool {tool.name!r} returned a part of the type {kind.name!r}, which {lack}, or return a description in words."
            )
        parts = [opened(part, f"part {i} of the answer", self.processor) for i, part in enumerate(content)]
        return limited(parts, lambda text: self._within(tool.limits, text))

    def _within(self, limits: Limits, text: str) -> str:
        """The result, cut at the first of its limits with a note."""
        text = readable(text)
        if limits.max_tokens is not None:
            ids = self.tokenizer(text[: limits.max_characters], add_special_tokens=False)["input_ids"]
            if len(ids) > limits.max_tokens:
                shortened = self.tokenizer.decode(ids[: limits.max_tokens]).rstrip("\ufffd")  # half of a character
                return f"{shortened}\n[{len(text) - len(shortened)} more characters were cut]"
        return cut(text, limits.max_characters)

    def _value(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        seconds = tool.limits.seconds
        if tool.limits.isolated:
            return json.loads(self._pool(tool).call(arguments, (), seconds)["values"])
        if tool.is_async:
            return self._loop.run(lambda: tool.call(**arguments), seconds)
        done: Future[Any] = Future()
        work = (done, partial(tool.call, **arguments))
        threading.Thread(target=settle, args=work, name="covey-tool-call", daemon=True).start()
        if not wait([done], seconds).done:  # the thread is abandoned
            raise DeadlineError
        value = done.result()
        return self._loop.run(lambda: value, seconds) if asyncio.iscoroutine(value) else value  # behind a decorator

    def _pool(self, tool: Tool) -> WorkerPool:
        if tool.name not in self._pools:
            self._pools[tool.name] = WorkerPool(tool.name, partial(_isolated, tool.call, tool.limits.max_memory), 4)
        return self._pools[tool.name]


def _isolated(call: Callable[..., Any], max_memory: int | None, /, **arguments: Any) -> str:
    """A tool as a worker process calls it: its text or parts come back as JSON, since replies of workers are numbers and text."""
    with _limit_memory(max_memory):
        returned = call(**arguments)
        content = content_of(asyncio.run(returned) if asyncio.iscoroutine(returned) else returned)
        if not isinstance(content, str):
            content = [sendable(part, "its answer") for part in content]
    return json.dumps(content)


@contextmanager
def _limit_memory(num_bytes: int | None) -> Iterator[None]:
    """No more than `num_bytes` of address space above this process's own (Linux): allocations past it raise MemoryError."""
    if num_bytes is None:
        yield
        return
    import resource  # absent on Windows

    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def cut(text: str, most: int) -> str:
    """The first `most` characters of a result, with a note where some are missing."""
    return text if len(text) <= most else f"{text[:most]}\n[{len(text) - most} more characters were cut]"


def _failed(request: Request, status: Literal["error", "timeout"], sentence: str, started: float) -> ToolCall:
    call = ToolCall(name=request.name, arguments=request.arguments, result="", seconds=time.perf_counter() - started)
    return failed(call, sentence, status)


def failed(call: ToolCall, sentence: str, status: Literal["error", "timeout"] = "error") -> ToolCall:
    """The call with an error as its answer."""
    answer = json.dumps({"error": cut(readable(sentence), 2000)}, ensure_ascii=False)
    return replace(call, result=answer, status=status, parts=())
