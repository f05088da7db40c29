"""Calls of tools: side by side, each within its limits. A failure is the tool's answer to the model and never ends a run."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from covey.data.media import MEDIA_PARTS
from covey.environments.tools import Limits, Tool, unknown_tool
from covey.errors import DataError
from covey.rewards.calling.deadline import DeadlineError, EventLoop
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


class MediaReturnedError(DataError):
    """A tool returned an image, a sound or a video, where answers are text."""


class ToolRunner:
    """Runs the calls of one decode step side by side: async tools on one event loop, others in threads or worker processes."""

    def __init__(self, tokenizer: Any = None) -> None:
        """`tokenizer`: the policy's, in whose tokens results are limited."""
        self.tokenizer = tokenizer
        self._loop = EventLoop()
        self._pools: dict[str, WorkerPool] = {}
        self._room = threading.BoundedSemaphore(AT_ONCE)

    def run(self, requests: Sequence[Request]) -> list[ToolCall]:
        """The result of every call, in order. Raises nothing that a tool raises, but DataError for a tool that returns an image."""
        results: list[ToolCall | MediaReturnedError | None] = [None] * len(requests)
        done = threading.Semaphore(0)

        def work(i: int) -> None:
            try:
                with self._room:
                    results[i] = self._call(requests[i])
            except MediaReturnedError as error:
                results[i] = error
            done.release()

        for i in range(len(requests)):
            threading.Thread(target=work, args=(i,), name="covey-tool", daemon=True).start()
        for _ in requests:
            done.acquire()
        for result in results:
            if isinstance(result, MediaReturnedError):
                raise result
        return [result for result in results if isinstance(result, ToolCall)]

    def close(self) -> None:
        """End the event loop and the worker processes."""
        self._loop.close()
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
            value = self._value(tool, dict(request.arguments))
            text = content_of(value)
        except MediaReturnedError:
            raise _media_returned(tool.name) from None
        except DeadlineError:
            sentence = f"{tool.name} did not answer within {tool.limits.seconds:g} seconds"
            return _failed(request, "timeout", sentence, started)
        except (WorkerError, WorkerDied) as error:
            if isinstance(error, WorkerError) and error.kind == MediaReturnedError.__name__:
                raise _media_returned(tool.name) from None
            kind = error.kind if isinstance(error, WorkerError) else "its process ended"
            return _failed(request, "error", f"{kind}: {error}" if str(error) else kind, started)
        except BaseException as error:  # noqa: BLE001 - any exception of a tool is its answer
            return _failed(request, "error", f"{type(error).__name__}: {error}", started)
        return ToolCall(
            name=tool.name,
            arguments=request.arguments,
            result=self._within(tool.limits, text),
            status="ok",
            seconds=time.perf_counter() - started,
        )

    def _within(self, limits: Limits, text: str) -> str:
        """The result, cut at the first of its limits with a note."""
        if limits.max_tokens is not None:
            ids = self.tokenizer(text[: limits.max_characters], add_special_tokens=False)["input_ids"]
            if len(ids) > limits.max_tokens:
                shortened = self.tokenizer.decode(ids[: limits.max_tokens]).rstrip("\ufffd")  # half of a character
                return f"{shortened}\n[{len(text) - len(shortened)} more characters were cut]"
        return cut(text, limits.max_characters)

    def _value(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        seconds = tool.limits.seconds
        if tool.limits.isolated:
            reply = self._pool(tool).call(arguments, (), seconds)
            return reply["values"]
        if tool.is_async:
            return self._loop.run(lambda: tool.call(**arguments), seconds)
        return in_thread(lambda: tool.call(**arguments), seconds)

    def _pool(self, tool: Tool) -> WorkerPool:
        if tool.name not in self._pools:
            self._pools[tool.name] = WorkerPool(tool.name, _Isolated(tool.call, tool.limits.max_memory), 4)
        return self._pools[tool.name]


class _Isolated:
    """A tool as a worker process calls it: text comes back, since replies of workers are JSON."""

    def __init__(self, call: Callable[..., Any], max_memory: int | None) -> None:
        self.call, self.max_memory = call, max_memory

    def __call__(self, **arguments: Any) -> str:
        with _limit_memory(self.max_memory):
            returned = self.call(**arguments)
            return content_of(asyncio.run(returned) if asyncio.iscoroutine(returned) else returned)


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


def in_thread(function: Callable[[], Any], seconds: float) -> Any:
    """Result of `function()`, called in a daemon thread that is abandoned past `seconds`. Raises DeadlineError then."""
    box: list[tuple[Any, BaseException | None]] = []
    done = threading.Event()

    def work() -> None:
        try:
            box.append((function(), None))
        except BaseException as error:  # noqa: BLE001 - raised again where it was called
            box.append((None, error))
        done.set()

    threading.Thread(target=work, name="covey-tool-call", daemon=True).start()
    if not done.wait(seconds):
        raise DeadlineError(f"it did not return within {seconds:g} seconds")
    value, error = box[0]
    if error is not None:
        raise error
    return value


def _media_returned(name: str) -> MediaReturnedError:
    return MediaReturnedError(
        f"tool {name!r} returned an image, a sound or a video, and answers of tools are text; return a description in words, and put images "
        "into the prompt."
    )


def content_of(value: Any) -> str:
    """A tool's return value as the text that the model reads: text as it is, JSON where it can be, else `str`.

    Raises MediaReturnedError for a picture of Pillow, and for parts of a message that hold an image, a sound or a video.
    """
    if isinstance(value, str):
        return value
    entries = value if isinstance(value, list | tuple) else [value]
    if any(kind.__module__.startswith("PIL.") for entry in entries for kind in type(entry).__mro__) or _are_parts(
        value
    ):
        raise MediaReturnedError("an image, a sound or a video")
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _are_parts(value: Any) -> bool:
    """True for the content of a message in parts that are not all text."""
    parts = value if isinstance(value, list) else []
    kinds = {str(part.get("type")) if isinstance(part, Mapping) else "" for part in parts}
    return bool(kinds & MEDIA_PARTS) and kinds <= {"text", *MEDIA_PARTS}


def cut(text: str, most: int) -> str:
    """The first `most` characters of a result, with a note where some are missing."""
    return text if len(text) <= most else f"{text[:most]}\n[{len(text) - most} more characters were cut]"


def _failed(request: Request, status: str, sentence: str, started: float) -> ToolCall:
    return ToolCall(
        name=request.name,
        arguments=request.arguments,
        result=json.dumps({"error": cut(sentence, 2000)}, ensure_ascii=False),
        status="timeout" if status == "timeout" else "error",
        seconds=time.perf_counter() - started,
    )
