"""Which plain functions run side by side: those that were seen to wait, and share nothing with another.

A plain function begins on the main thread, one after the other, as in TRL: only there can a hung regular expression be
interrupted, only there may a function set signals (math-verify does), and the order of calls is what it looks like. What
computes gains nothing from a thread, since one thread at a time runs Python. What waits (for a network, a process, a disk)
gains everything and has nothing there to hang in; so it is moved once it was seen to wait, and comes back when it computes.
"""

from __future__ import annotations

import dis
import functools
import itertools
import logging
import random
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch

from covey.rewards.outcome import Outcome

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LONG_SECONDS = 0.02
"""Calls below it say nothing about waiting, and nothing is gained by moving them."""
_COMPUTING = 0.25
"""The share of a call's time on a processor from which it computes; below, it waits."""
_CONTAINERS = (dict, list, set, deque, bytearray)


class Habit:
    """What one plain function was seen to do, and so where it is called next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_bound = False
        """It stays on the main thread for good: it drew random numbers, set a signal, shares state, or failed in a thread."""
        self._waits = False
        self._is_proven = False

    @property
    def is_beside(self) -> bool:
        """Whether the next call runs in a thread beside the others."""
        return self._waits and not self.is_bound

    def watch(self, function: Callable[[], T]) -> T:
        """What `function()` returns, having noted how it spent its time."""
        is_main = threading.current_thread() is threading.main_thread()
        before = _draws() if is_main else None
        wall, used = time.perf_counter(), _busy_seconds()
        try:
            with self._noting_signals() if is_main else _nothing():
                return function()
        finally:
            wall, used = time.perf_counter() - wall, _busy_seconds() - used
            if is_main and _draws() != before:
                self.is_bound = True
            if wall >= _LONG_SECONDS:
                self._settle(used < _COMPUTING * wall)

    def has_misled(self, outcome: Outcome) -> bool:
        """Whether a call in a thread failed because it was in a thread; then it is called again, on the main thread for good.

        Told by an error in the first such call, or by one that speaks of threads (as asyncio, sqlite3 and signal do).
        """
        errors = [failure.error for failure in outcome.failures if not isinstance(failure.error, TimeoutError)]
        suspects = [error for error in errors if not self._is_proven or "thread" in str(error).lower()]
        self._is_proven = True
        self.is_bound = self.is_bound or bool(suspects)
        return bool(suspects)

    def _settle(self, waits: bool) -> None:
        if waits and not self._waits and not self.is_bound:
            logger.debug(
                "Reward %r waits more than it computes; it runs beside the others from the next batch on.", self.name
            )
        self._waits = waits

    @contextmanager
    def _noting_signals(self) -> Iterator[None]:
        """Notes handlers that are set meanwhile, but for Ctrl-C's, which `asyncio.run` sets where it can."""
        real = signal.signal

        def noting(number: Any, handler: Any) -> Any:
            self.is_bound = self.is_bound or number != signal.SIGINT
            return real(number, handler)

        setattr(signal, "signal", noting)  # noqa: B010 - only the main thread may call it, and that is here
        try:
            yield
        finally:
            setattr(signal, "signal", real)  # noqa: B010


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _busy_seconds() -> float:
    """What this thread computed, and stood in line for a processor to compute, where the kernel tells that."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            queued = int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        queued = 0.0
    return time.thread_time() + queued


def _draws() -> tuple[Any, ...]:
    """The states of the generators that a run saves: what draws from them keeps its place in the order of calls."""
    numpy = sys.modules.get("numpy")
    legacy: Any = numpy.random.get_state(legacy=False)["state"] if numpy is not None else None
    theirs = None if legacy is None else (legacy["pos"], legacy["key"].tobytes())
    return random.getstate(), theirs, torch.random.get_rng_state().numpy().tobytes()


def habits(rewards: Sequence[tuple[str, Any]]) -> list[Habit]:
    """A habit for each of a scorer's plain functions; those that share state with another are bound to the main thread."""
    found = [Habit(name) for name, _ in rewards]
    states = [State.of(reward) for _, reward in rewards]
    for (one, mine), (other, theirs) in itertools.combinations(zip(found, states, strict=True), 2):
        shared = mine.shared_with(theirs)
        if shared is not None:
            logger.debug(
                "Rewards %r and %r both use %s, so they run one after the other.", one.name, other.name, shared
            )
            one.is_bound = other.is_bound = True
    return found


@dataclass(frozen=True)
class State:
    """What a function could leave for another, or find: keys that are equal where the place is, each with its name."""

    reads: dict[Any, str] = field(default_factory=dict)
    """Names of its module and its closure."""
    writes: dict[Any, str] = field(default_factory=dict)
    """Those that it assigns; containers that it can reach, and the object that it is a method of."""

    @staticmethod
    def of(reward: Any) -> State:
        """By looking at its code and that of the functions of its module that it names."""
        state = State()
        state._take(reward, depth=2)
        return state

    def shared_with(self, other: State) -> str | None:
        """The name of something that one may change and the other use."""
        keys = (self.writes.keys() & (other.writes | other.reads).keys()) | (other.writes.keys() & self.reads.keys())
        names = {**self.reads, **self.writes}
        return min((names[key] for key in keys), default=None)

    def _take(self, reward: Any, depth: int) -> None:
        while isinstance(reward, functools.partial):
            reward = reward.func
        function = reward
        if not isinstance(reward, FunctionType):
            owner = getattr(reward, "__self__", reward)
            self.writes[id(owner)] = f"one {type(owner).__name__}"
            function = getattr(reward, "__func__", getattr(type(reward), "__call__", None))  # noqa: B004
        if not isinstance(function, FunctionType):
            return
        own, cells = (
            function.__globals__,
            dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)),
        )
        for name, cell in cells.items():
            self.reads[id(cell)] = name
            self._hold(name, cell.cell_contents if _is_filled(cell) else None)
        for code in _codes(function.__code__):
            for step in dis.get_instructions(code):
                if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                    self.writes[id(own), step.argval] = step.argval
                elif step.opname == "STORE_DEREF" and step.argval in cells:
                    self.writes[id(cells[step.argval])] = step.argval
                elif step.opname == "LOAD_GLOBAL" and step.argval in own:
                    self.reads[id(own), step.argval] = step.argval
                    self._hold(step.argval, own[step.argval])
        helpers = [own.get(name) for name in self.reads.values()] if depth else []
        for helper in helpers:
            if isinstance(helper, FunctionType) and helper.__globals__ is own:
                self._take(helper, depth - 1)

    def _hold(self, name: str, value: Any) -> None:
        if isinstance(value, _CONTAINERS):
            self.writes[id(value)] = name


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # not assigned yet
        return False
