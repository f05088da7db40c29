"""Adapters: Gymnasium environments, MCP servers and OpenEnv servers, each the real one, and the examination of an environment."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.cli import main
from covey.environments import EnvironmentPool, gymnasium_environment, mcp_tools, openenv_environment
from covey.environments.calls import Request, ToolRunner
from covey.environments.check import examine
from covey.errors import ConfigError
from covey.types import Prompt
from forked import run

COMMAND = "import sys; from covey.cli import main; sys.exit(main(sys.argv[1:]))"
HERE = Path(__file__).parent
SERVERS = str(HERE / "servers.py")


def prompt(uid: str = "0:3", **columns: Any) -> Prompt:
    return Prompt(uid=uid, messages=({"role": "user", "content": ""},), token_ids=(0,), columns=columns)


def begun(pool: EnvironmentPool, n: int = 1, **columns: Any) -> list[Any]:
    return pool.reset(prompt(**columns), n, lambda messages, prompt, tools: prompt)[1]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def server(python: str, kind: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([python, SERVERS, kind, "http", str(port)], env={**os.environ, "PYTHONPATH": ""})
    try:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, "the server ended"
            time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()


class TestGymnasium:
    @pytest.fixture(autouse=True)
    def corridor(self):
        gymnasium = pytest.importorskip("gymnasium")
        from adapters import Corridor

        self.make = gymnasium_environment(Corridor, actions=["left", "right"], render_mode="ansi")
        self.Corridor, self.gymnasium = Corridor, gymnasium

    def test_a_group_begins_at_one_place_and_the_next_visit_of_the_row_at_another(self):
        pool = EnvironmentPool(self.make)
        encode = lambda messages, prompt, tools: replace(prompt, messages=tuple(messages), token_ids=(1, 2))
        shown, resets = pool.reset(prompt("0:3"), 4, encode)
        assert shown.messages[0]["content"].startswith("You stand at ")
        assert len({id(one.instance) for one in resets}) == 4
        others = {pool.reset(prompt(f"{epoch}:3"), 1, encode)[0].messages[0]["content"] for epoch in range(8)}
        assert len(others) > 1

    def test_steps_are_a_tool_whose_rewards_add_up_until_the_episode_is_over(self):
        pool = EnvironmentPool(self.make)
        (tool,) = pool.tools[None]
        assert tool.parameters["action"]["enum"] == ["left", "right"]
        (reset,) = begun(pool, seed=5)
        call = reset.tools[0].call
        start = reset.instance.environment.env.start
        assert [call(action=one) for one in ("left", "right")] == [f"You stand at {start + k}." for k in (-1, 0)]
        assert not reset.instance.is_over
        for _ in range(3):
            call(action="right")
        assert reset.instance.is_over
        assert reset.instance.turn_rewards == [0.0, 0.0, 0.0, 0.0, 1.0]
        assert [reward([reset.instance]) for reward in pool.rewards] == [[1.0]]

    def test_an_action_that_is_none_is_the_tools_answer(self):
        pool = EnvironmentPool(self.make)
        (reset,) = begun(pool)
        request = Request("step", {"action": "jump"}, {one.name: one for one in reset.tools})
        (done,) = ToolRunner().run([request])
        assert done.status == "error"
        assert "'jump' is no action; take one of left, right" in done.result

    def test_what_a_tool_cannot_take_is_refused(self):
        with pytest.raises(ConfigError, match="2 actions, and 3 names were given"):
            gymnasium_environment(self.Corridor, actions=["a", "b", "c"])()
        with pytest.raises(ConfigError, match="gymnasium cannot make 'NoSuchThing-v0'"):
            gymnasium_environment("NoSuchThing-v0")()
        with pytest.raises(ConfigError, match="which a tool cannot take"):
            gymnasium_environment("Pendulum-v1")()


class TestMCP:
    @pytest.fixture(autouse=True)
    def package(self):
        pytest.importorskip("mcp")

    def ask(self, tools: list[Any], *calls: tuple[str, dict[str, Any]]) -> list[tuple[str, str]]:
        known = {one.name: one for one in tools}
        return [(one.status, one.result) for one in ToolRunner().run([Request(n, a, known) for n, a in calls])]

    @pytest.mark.slow
    def test_a_server_over_standard_streams_gives_its_tools_and_is_started_again_when_it_dies(self):
        tools = mcp_tools(f"{sys.executable} {SERVERS} mcp stdio 0")
        assert {one.name for one in tools} == {"add", "fail", "die"}
        assert tools[0].schema["function"]["description"] == "Add two numbers."
        calls = [("add", {"a": k, "b": 2}) for k in range(6)]
        assert self.ask(tools, *calls) == [("ok", str(k + 2)) for k in range(6)]
        ((status, said),) = self.ask(tools, ("fail", {}))
        assert status == "error"
        assert "no such page" in said
        assert self.ask(tools, ("add", {"a": 1}))[0][0] == "error"
        assert self.ask(tools, ("die", {}))[0][0] == "error"
        assert self.ask(tools, ("add", {"a": 2, "b": 2})) == [("ok", "4")]

    @pytest.mark.nightly
    def test_a_server_over_http(self):
        port = free_port()
        with server(sys.executable, "mcp", port):
            tools = mcp_tools(f"http://127.0.0.1:{port}/mcp")
            assert self.ask(tools, ("add", {"a": 20, "b": 22})) == [("ok", "42")]

    def test_a_command_that_is_no_server_is_told_before_the_run(self):
        with pytest.raises(ConfigError, match="MCP server 'no-such-command --x' cannot be used"):
            mcp_tools("no-such-command --x")


def openenv_python() -> str:
    """The Python of an environment with openenv-core, whose own requirements are too many to share ours."""
    return os.environ.get("COVEY_OPENENV_PYTHON", "")


@pytest.mark.skipif(not openenv_python(), reason="COVEY_OPENENV_PYTHON names no Python with openenv-core")
class TestOpenEnv:
    def test_sessions_of_a_server_are_apart_and_end_with_their_game(self):
        port = free_port()
        with server(openenv_python(), "openenv", port):
            pool = EnvironmentPool(openenv_environment(f"http://127.0.0.1:{port}"))
            (tool,) = pool.tools[None]
            assert list(tool.parameters) == ["number"]
            resets = begun(pool, 8, seed=11)
            right = [
                k
                for k in range(10)
                if begun(EnvironmentPool(pool.factories[None]), seed=11)[0].tools[0].call(number=k) == "Right."
            ]
            assert len(right) == 1
            answers = [one.tools[0].call(number=right[0] if i % 2 else 9 - right[0]) for i, one in enumerate(resets)]
            assert answers[1::2] == ["Right."] * 4
            assert [one.instance.is_over for one in resets] == [False, True] * 4
            assert [one.instance.get_reward() for one in resets] == [0.0, 1.0] * 4
            with pytest.raises(RuntimeError, match="numbers begin at 0"):
                resets[0].tools[0].call(number=-1)
            report = examine(openenv_environment(f"http://127.0.0.1:{port}"), episodes=5)
            assert (report.is_repeatable, report.are_apart, report.left) == (True, True, {})
            pool.close()

    def test_a_server_that_is_gone_is_the_tools_answer_and_no_server_is_refused(self):
        port = free_port()
        with server(openenv_python(), "openenv", port) as process:
            pool = EnvironmentPool(openenv_environment(f"http://127.0.0.1:{port}"))
            (reset,) = begun(pool)
            process.kill()
            (done,) = ToolRunner().run([Request("step", {"number": 1}, {"step": reset.tools[0]})])
            assert done.status == "error"
        with pytest.raises(ConfigError, match="does not answer"):
            openenv_environment(f"http://127.0.0.1:{port}")()


class TestCheck:
    def test_a_sound_environment_passes_with_its_figures(self):
        pytest.importorskip("gymnasium")
        words = ("env", "check", "gymnasium:FrozenLake-v1", "--episodes", "8", "--json")
        alone = run("-c", COMMAND, *words)  # processes that other tests began are not the environment's
        assert alone.returncode == 0, alone.err
        found = json.loads(alone.out)
        assert found["ok"]
        assert found["same_under_a_seed"]
        assert found["sessions_apart"]
        assert found["calls"] > 8
        assert 0 <= found["random_episodes_that_score"] <= 1

    def test_what_must_be_mended_is_said(self, capsys, monkeypatch):
        pytest.importorskip("gymnasium")
        monkeypatch.chdir(HERE)
        assert main(["env", "check", "adapters.py:Careless"]) == 1
        out = capsys.readouterr().out
        for said in ("every call failed", "gave another episode", "every random episode earned 1"):
            assert said in out
        assert main(["env", "check", "adapters.py:Shared"]) == 1
        assert "two episodes at once disturb each other" in capsys.readouterr().out

    def test_wrong_options_are_told_in_a_sentence(self, capsys):
        for words, said in (
            ([], "covey env check needs an environment"),
            (["x.py:A", "--episodes", "0"], "--episodes 0 must be at least 1"),
            (["x.py:A", "--row", "{"], "is no JSON"),
            (["openenv:localhost"], "is no URL"),
            (["gymnasium:None-v0"], "cannot make 'None-v0'"),
        ):
            assert main(["env", "check", *words]) == 2
            assert said in capsys.readouterr().err
