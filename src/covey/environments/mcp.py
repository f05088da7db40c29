"""Tools of an MCP server (Model Context Protocol), over its standard streams or HTTP (extra `mcp`)."""

from __future__ import annotations

import asyncio
import shlex
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

from covey.environments.tools import SECONDS, Limits, Tool
from covey.errors import ConfigError, needed

_START = 30.0
"""Seconds for a server to start and list its tools."""


def mcp_tools(server: str, timeout: float = SECONDS) -> list[Tool]:
    """The tools of an MCP server: a URL (`http://localhost:8000/mcp`), or a command that speaks over its standard streams.

    `timeout`: seconds of one call. A server that dies is started or connected to again at the next call. Raises ConfigError for
    a server that does not start, or has no tools.
    """
    session = _Session(server)
    described = session.start()
    if not described:
        raise ConfigError(f"MCP server {server!r} has no tools; give another.")
    return [
        Tool(
            name=tool.name,
            call=partial(_call, session, tool.name, timeout),
            schema={
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": dict(tool.input_schema),
                },
            },
            limits=Limits(seconds=timeout),
        )
        for tool in described
    ]


def _call(session: _Session, name: str, timeout: float, /, **arguments: Any) -> Any:
    """Result of one tool of a server: its text, or parts where it has media."""
    result = session.call(name, arguments, timeout)
    text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
    if result.is_error:
        raise RuntimeError(text)
    return list(map(_as_part, result.content)) if {part.type for part in result.content} & _MEDIA else text


_MEDIA = {"image", "audio"}


def _as_part(part: Any) -> dict[str, Any]:
    """A part of the protocol, whose images and sounds are base64, as a part of a message."""
    if part.type in _MEDIA:
        return {"type": part.type, "base64": part.data}
    return {"type": "text", "text": getattr(part, "text", f"[{part.type}]")}


class _Session:
    """A client in a thread of its own, since its connection belongs to one event loop."""

    def __init__(self, server: str) -> None:
        self.server = server
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._client: Any = None

    def start(self) -> list[Any]:
        """Connect; the tools of the server."""
        ready: list[Any] = []
        done = threading.Event()
        threading.Thread(target=self._run, args=(ready, done), name="covey-mcp", daemon=True).start()
        if not done.wait(_START):
            raise ConfigError(f"MCP server {self.server!r} did not list its tools within {_START:g} seconds.")
        if isinstance(ready[0], BaseException):
            error = _innermost(ready[0])
            raise ConfigError(
                f"MCP server {self.server!r} cannot be used ({type(error).__name__}: {error}); give a URL or a "
                "command that starts it."
            ) from error
        return list(ready[0])

    def call(self, name: str, arguments: Mapping[str, Any], timeout: float) -> Any:
        """The result of one call. Raises errors of the server and of the connection; a lost connection is made again at the next call."""
        with self._lock:
            if self._client is None:
                self.start()
            client, loop = self._client, self._loop
        assert loop is not None
        try:
            return asyncio.run_coroutine_threadsafe(client.call_tool(name, dict(arguments)), loop).result(timeout)
        except Exception as error:
            if _is_lost(error):
                self._drop(client)
            raise

    def _drop(self, client: Any) -> None:
        with self._lock:
            if self._client is client and self._loop is not None and self._ended is not None:
                self._client = None
                self._loop.call_soon_threadsafe(self._ended.set)

    def _run(self, ready: list[Any], done: threading.Event) -> None:
        try:
            asyncio.run(self._serve(ready, done))
        except BaseException as error:  # noqa: BLE001 - raised by the waiting thread
            ready.append(error)
        finally:
            done.set()

    async def _serve(self, ready: list[Any], done: threading.Event) -> None:
        with needed("MCP servers need mcp", "mcp"):
            from mcp import Client, StdioServerParameters
        if self.server.startswith(("http://", "https://")):
            place: Any = self.server
        else:
            command, *arguments = shlex.split(self.server)
            place = StdioServerParameters(command=command, args=arguments)
        async with Client(place) as client:
            ready.append((await client.list_tools()).tools)
            self._client, self._loop, self._ended = client, asyncio.get_running_loop(), asyncio.Event()
            done.set()
            await self._ended.wait()


def _is_lost(error: Exception) -> bool:
    """True if the connection is gone, false for what the server itself says, and for a call past its time."""
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED

    if isinstance(error, MCPError):
        return bool(error.code == CONNECTION_CLOSED)
    return not isinstance(error, TimeoutError)


def _innermost(error: BaseException) -> BaseException:
    """The first error inside groups of errors."""
    while getattr(error, "exceptions", None):
        error = error.exceptions[0]  # type: ignore[attr-defined]
    return error
