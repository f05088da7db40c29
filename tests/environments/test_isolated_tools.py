"""Isolated tools: called in a process of their own, within a limit of memory."""

import asyncio
import functools
import os

import numpy as np
import pytest

from covey.environments import tool, tools_of
from covey.environments.calls import Request, ToolRunner
from covey.environments.factory import EnvironmentPool
from covey.errors import ConfigError, DataError


@tool(isolated=True, max_memory=2**28)
def hold(num_bytes: int) -> str:
    """Allocate bytes.

    Args:
        num_bytes: Number of bytes.
    """
    return f"{len(bytearray(num_bytes))} in {os.getpid()}"


@pytest.mark.slow
def test_a_call_past_its_memory_is_an_error_and_the_next_one_runs():
    tools = {one.name: one for one in tools_of([hold])}
    runner = ToolRunner()
    try:
        fits, too_large, again = (
            runner.run([Request("hold", {"num_bytes": n}, tools)])[0] for n in (1000, 2**30, 2**20)
        )
    finally:
        runner.close()
    assert fits.status == again.status == "ok"
    assert fits.result.split()[2] == again.result.split()[2] != str(os.getpid())
    assert (too_large.status, "MemoryError" in too_large.result) == ("error", True)


@tool(isolated=True)
def film(seconds: int):
    """Film the room.

    Args:
        seconds: Length.
    """
    return np.zeros((seconds, 30, 40, 3), np.uint8)


@pytest.mark.nightly
def test_pixels_that_are_returned_end_the_run_as_they_do_without_isolation():
    runner = ToolRunner()
    try:
        with pytest.raises(DataError, match=r"an array of bytes of the shape \[2, 30, 40, 3\], .*return PIL.Image"):
            runner.run([Request("film", {"seconds": 2}, {made.name: made for made in tools_of([film])})])
    finally:
        runner.close()


class Counter:
    def reset(self, **row):
        self.count = 0

    @tool(isolated=True)
    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: The number.
        """
        self.count += number
        return str(self.count)


def test_a_method_that_would_change_a_copy_of_its_environment_is_refused():
    with pytest.raises(ConfigError, match=r"Counter.add is isolated, and would change a copy of its environment"):
        EnvironmentPool(Counter)


def logged(function):
    @functools.wraps(function)
    def inner(*values, **arguments):
        return function(*values, **arguments)

    return inner


@logged
async def look(query: str) -> str:
    """Look for words.

    Args:
        query: The words.
    """
    await asyncio.sleep(0)
    return f"looked for {query}"


def test_an_async_tool_behind_a_plain_decorator_is_awaited():
    runner = ToolRunner()
    try:
        (call,) = runner.run([Request("look", {"query": "a"}, {made.name: made for made in tools_of([look])})])
    finally:
        runner.close()
    assert (call.status, call.result) == ("ok", "looked for a")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_memory": 2**28}, "needs isolated=True"),
        ({"max_memory": 0.5, "isolated": True}, "whole number of bytes"),
        ({"timeout": "5"}, "give seconds above 0"),
        ({"isolated": "yes"}, "must be True or False"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        tool(**given)
