"""GRPO on OpenEnv's own harness, unmodified: its tool loop, its clients of model and environment, and a server of its environments.

    python examples/agents/openenv_harness.py --smoke      # a minute on one core; without --smoke ten

It starts an OpenEnv server of products with a calculator, and trains the model of calculator.py on it. It needs `pip install openenv-core`.
`main` is the agent: `OPENENV_URL=http://HOST:PORT covey train --agent openenv_harness.py:main` trains on a server that runs already.
A real model: `model` in calculator.py. Expect: what calculator.py promises, and of its smoke that everything runs.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from warm_up import TOOL

# -- the environment, a server of its own ---------------------------------------------------------------------------


def serve(port: int) -> None:
    """An OpenEnv server: an episode is a question; a step computes a product, or answers and ends the episode."""
    import uvicorn
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Move(Action):
        calc: str = ""
        answer: str | None = None

    class Seen(Observation):
        text: str = ""

    class Products(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, question: str = "", **_: Any) -> Seen:
            numbers = [int(word) for word in question.rstrip("?").split() if word.isdigit()]
            self.product, self.count = numbers[0] * numbers[1], 0
            return Seen(text=question)

        def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Seen:
            from calculator import calc

            self.count += 1
            if action.answer is None:
                return Seen(text=calc(action.calc), reward=0.0)
            return Seen(done=True, reward=float(action.answer.strip() == str(self.product)))

        @property
        def state(self) -> State:
            return State(step_count=self.count)

    app = create_app(Products, Move, Seen, env_name="products", max_concurrent_envs=256)
    uvicorn.run(
        app, host="127.0.0.1", port=port, log_level="critical"
    )  # OpenEnv 0.3 tells of each session that ends as of an error


@contextmanager
def server() -> Iterator[None]:
    """A server in a process of its own; OPENENV_URL says where."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    process = subprocess.Popen([sys.executable, __file__, "serve", str(port)])
    try:
        until = time.monotonic() + 120
        while socket.socket().connect_ex(("127.0.0.1", port)):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit("The OpenEnv server did not start; its reason stands above.")
            time.sleep(0.2)
        os.environ["OPENENV_URL"] = f"http://127.0.0.1:{port}"
        yield
    finally:
        process.kill()
        process.wait()


# -- the agent: OpenEnv's harness -----------------------------------------------------------------------------------


def main(row: dict[str, Any], base_url: str, api_key: str, model: str, seed: int) -> dict[str, Any]:
    """One episode of the harness. Nothing here knows of training."""
    from openenv.core import GenericEnvClient
    from openenv.core.env_server.mcp_types import Tool
    from openenv.core.harness import (
        HarnessRunLimits,
        MCPHarnessAdapter,
        StepEnvSessionAdapter,
        ToolResult,
        VerifyResult,
    )
    from openenv.core.harness.collect import build_model_step
    from openenv.core.llm_client import OpenAIClient

    class Session(StepEnvSessionAdapter):
        def verify(self, transcript: list[dict[str, Any]], final_state: Any | None = None) -> VerifyResult:
            """The environment's reward for the last answer."""
            found = self._client.step({"answer": transcript[-1]["content"]})
            return VerifyResult(env_reward=found.reward, done=found.done)

    there, function = urlsplit(base_url), TOOL["function"]
    policy = OpenAIClient(f"http://{there.hostname}", there.port, model, api_key=api_key, max_tokens=96)
    session = Session(
        GenericEnvClient(os.environ.get("OPENENV_URL", "http://127.0.0.1:8000")),
        seed=seed,
        reset_kwargs={"question": row["prompt"][-1]["content"]},
        tool_specs=[Tool(name="calc", description=function["description"], input_schema=function["parameters"])],
        action_builder=lambda name, arguments: {"calc": str(arguments.get("x"))},
        initial_messages_builder=lambda first, task: [{"role": "user", "content": first.observation["text"]}],
        tool_result_builder=lambda name, arguments, found, state: ToolResult(data=found.observation["text"]),
    )
    try:
        played = MCPHarnessAdapter().run_white_box(build_model_step(policy), session, HarnessRunLimits(max_turns=3))
        return {"score": session.verify(played.messages).env_reward, "called": bool(played.tool_trace)}
    finally:
        session.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(int(sys.argv[2]))
        raise SystemExit(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/openenv"))
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that everything works")
    given = parser.parse_args()
    from calculator import train

    with server():
        train(given.folder, given.smoke, given.seed, agent=main, name="openenv")
