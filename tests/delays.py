"""Delays planted at boundaries between threads and processes: what depends on their order differs at once, not once in a thousand runs."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from covey.rollout import worker_process
from forked import Forked

SERVED = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from covey.rollout import worker; from delays import plant; "
    "plant(json.loads(sys.argv.pop())); worker.main()"
)
"""Code of a worker process with delays."""


def plant(delays: Mapping[str, float]) -> list[tuple[Any, str, Any]]:
    """Sleep so many seconds before and after each call of `module:name` or `module:Class.name`. Returns what was there."""
    before = []
    for path, seconds in delays.items():
        module, _, names = path.partition(":")
        *outer, name = names.split(".")
        owner = functools.reduce(getattr, outer, import_module(module))
        before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, _slow(getattr(owner, name), seconds))
    return before


def _slow(call: Any, seconds: float) -> Any:
    @functools.wraps(call)
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        result = call(*args, **kwargs)
        time.sleep(seconds)
        return result

    return slow


@contextmanager
def planted(here: Mapping[str, float], there: Mapping[str, float]) -> Iterator[None]:
    """Context with delays in this process, and in the worker processes that it starts: forks, which have imported everything."""

    def start(theirs: Connection) -> Forked:
        words = ("-c", SERVED, "0", json.dumps(there), json.dumps(sys.path))
        with theirs:
            return Forked(*words, stdin=theirs.fileno(), is_session=True)

    before = [(worker_process, "_start", worker_process._start), *plant(here)]
    worker_process._start = start
    try:
        yield
    finally:
        for owner, name, call in before:
            setattr(owner, name, call)
