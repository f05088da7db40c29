"""Servers for the tests of adapters, run as programs of their own."""

from __future__ import annotations

import sys
from typing import Any


def mcp_server(transport: str, port: int) -> None:
    """An MCP server with three tools, for `python servers.py mcp stdio 0`."""
    import os

    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    server = MCPServer("sums")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    def fail() -> str:
        """Always fails."""
        raise ToolError("no such page")

    @server.tool()
    def die() -> str:
        """Ends the server."""
        os._exit(3)

    if transport == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=port)


def openenv_server(port: int) -> None:
    """An OpenEnv server of a guessing game, for `python servers.py openenv http PORT`."""
    import random

    import uvicorn
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Guess(Action):
        number: int

    class Answer(Observation):
        text: str = ""

    class Game(Environment):  # type: ignore[misc, type-arg]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Answer:
            self.number, self.steps = random.Random(seed).randint(0, 9), 0
            return Answer(text="Guess a number from 0 to 9.", done=False, reward=0.0)

        def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Answer:
            self.steps += 1
            if action.number < 0:
                raise ValueError("numbers begin at 0")
            is_right = action.number == self.number
            said = "Right." if is_right else "Higher." if self.number > action.number else "Lower."
            return Answer(text=said, done=is_right, reward=float(is_right))

        @property
        def state(self) -> State:
            return State(step_count=self.steps)

    app = create_app(Game, Guess, Answer, env_name="guess", max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    kind, transport, port = sys.argv[1:4]
    if kind == "mcp":
        mcp_server(transport, int(port))
    else:
        openenv_server(int(port))
