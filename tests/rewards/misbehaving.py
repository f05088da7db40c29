"""Rewards that misbehave, by name: each takes completions ["4", "bad", "5", ""] and does harm, most of them on "bad" alone."""

from __future__ import annotations

import asyncio
import decimal
import fractions
import gc
import io
import itertools
import os
import random
import signal
import sys
import threading
import time
import types

import numpy as np
import torch

from covey.rewards import per_completion, reward


class OwnBase(BaseException):
    pass


class UnspeakableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


class UnspeakableBase(BaseException):
    def __str__(self):
        raise KeyboardInterrupt

    __repr__ = __str__


class WordyError(Exception):
    def __str__(self):
        return "x\n" * 1_000_000


class NotTextError(Exception):
    def __str__(self):
        return 3  # type: ignore[return-value]


class LyingKindError(Exception):
    @property
    def kind(self):
        raise OwnBase


class OddSyntaxError(SyntaxError):
    lineno = "three"
    text = 4
    offset = object()


class Floatless(float):
    def __float__(self):
        raise RuntimeError("no float")


class FloatsToText(float):
    def __float__(self):
        return "1"  # type: ignore[return-value]


class FloatsToInfinity(float):
    def __float__(self):
        return float("inf")


class ExitsAsFloat(float):
    def __float__(self):
        raise SystemExit(3)


class FalseClass:
    @property
    def __class__(self):
        raise OwnBase


class Moody:
    def __getattr__(self, name):
        raise RuntimeError(f"no {name}")


def raising(error):
    """A reward that raises on "bad" alone."""

    def call(completions, **columns):
        if "bad" in completions:
            raise error() if callable(error) else error
        return [1.0 for _ in completions]

    return call


def valued(value):
    """A reward whose score of "bad" is odd."""
    return lambda completions: [value() if c == "bad" else 1.0 for c in completions]


def noted():
    error = ValueError("no")
    error.__notes__ = 3
    return error


def looped():
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    return one


ONE_BAD = {
    "GeneratorExit": raising(GeneratorExit),
    "CancelledError": raising(asyncio.CancelledError),
    "KeyboardInterrupt": raising(KeyboardInterrupt),
    "SystemExit": raising(SystemExit),
    "SystemExit with text": raising(SystemExit("gone")),
    "StopIteration": raising(StopIteration),
    "StopAsyncIteration": raising(StopAsyncIteration),
    "own BaseException": raising(OwnBase),
    "a text that raises": raising(UnspeakableError),
    "a text that raises KeyboardInterrupt": raising(UnspeakableBase),
    "a text of a megabyte": raising(WordyError),
    "a text that is no text": raising(NotTextError),
    "an attribute that raises": raising(LyingKindError),
    "a syntax error with odd places": raising(lambda: OddSyntaxError("odd")),
    "odd notes": raising(noted),
    "a loop of causes": raising(looped),
    "MemoryError": raising(MemoryError),
    "RecursionError": raising(RecursionError),
    "TimeoutError": raising(TimeoutError),
    "AssertionError": raising(AssertionError),
    "sys.exit": lambda completions: [sys.exit() if c == "bad" else 1.0 for c in completions],
    "endless recursion": lambda completions: [_deep(c) for c in completions],
    "a float that raises": valued(lambda: Floatless(1)),
    "a float that gives text": valued(lambda: FloatsToText(1)),
    "a float that is infinite": valued(lambda: FloatsToInfinity(1)),
    "a float that exits": valued(lambda: ExitsAsFloat(1)),
    "infinity": valued(lambda: float("inf")),
    "minus infinity": valued(lambda: float("-inf")),
    "a huge int": valued(lambda: 10**5000),
    "a huge float": valued(lambda: 1e308),
    "a huge fraction": valued(lambda: fractions.Fraction(10**400, 3)),
    "a signalling NaN": valued(lambda: decimal.Decimal("sNaN")),
    "an infinite numpy scalar": valued(lambda: np.float32("inf")),
    "an infinite tensor": valued(lambda: torch.tensor(float("inf"))),
    "a class that raises": valued(FalseClass),
    "attributes that raise": valued(Moody),
}
"""Lose the score of "bad" and no other."""


def _deep(completion):
    return 1.0 + _deep(completion) if completion == "bad" else 1.0


async def _cancelled(completions):
    if "bad" in completions:
        raise asyncio.CancelledError
    return [1.0 for _ in completions]


async def _exits(completions):
    if "bad" in completions:
        sys.exit(1)
    return [1.0 for _ in completions]


async def _interrupts(completions):
    if "bad" in completions:
        raise KeyboardInterrupt
    return [1.0 for _ in completions]


async def _own_base(completions):
    if "bad" in completions:
        raise OwnBase
    return [1.0 for _ in completions]


@reward(in_thread=True)
def _thread_interrupts(completions):
    return raising(KeyboardInterrupt)(completions)


@reward(streams=True)
def _streamed_base(completions):
    return raising(OwnBase)(completions)


@per_completion
def _single_exit(completion):
    return sys.exit(1) if completion == "bad" else 1.0


ONE_BAD |= {
    "async CancelledError": _cancelled,
    "async SystemExit": _exits,
    "async KeyboardInterrupt": _interrupts,
    "async own BaseException": _own_base,
    "KeyboardInterrupt in a thread": _thread_interrupts,
    "own BaseException while streaming": _streamed_base,
    "SystemExit for one completion": _single_exit,
}


# -- what is returned ------------------------------------------------------------------------------------------------------


def _generator(completions):
    yield from (1.0 for _ in completions)


def _generator_that_raises(completions):
    yield 1.0
    raise GeneratorExit


async def _async_generator(completions):
    for _ in completions:
        yield 1.0


class Endless:
    def __iter__(self):
        return itertools.repeat(1.0)


class BadLength(list):
    def __len__(self):
        raise OwnBase


REFUSED = {
    "None": lambda completions: None,
    "a float": lambda completions: 1.0,
    "a text": lambda completions: "1" * len(completions),
    "bytes": lambda completions: b"1" * len(completions),
    "a dict": lambda completions: dict.fromkeys(range(len(completions)), 1.0),
    "a set": lambda completions: set(map(float, range(len(completions)))),
    "too few": lambda completions: [1.0],
    "too many": lambda completions: [1.0] * (len(completions) + 1),
    "without end": lambda completions: itertools.repeat(1.0),
    "an iterable without end": lambda completions: Endless(),
    "a matrix": lambda completions: np.ones((len(completions), 1)),
    "a tensor of two axes": lambda completions: torch.ones(len(completions), 2),
    "complex numbers": lambda completions: [1j for _ in completions],
    "complex tensor": lambda completions: torch.ones(len(completions), dtype=torch.complex64),
    "texts": lambda completions: ["1.0" for _ in completions],
    "lists": lambda completions: [[1.0] for _ in completions],
    "an array of texts": lambda completions: np.array(["1"] * len(completions)),
    "an async generator": lambda completions: _async_generator(completions),
    "a function": lambda completions: lambda: None,
    "a module": lambda completions: types.ModuleType("scores"),
}
"""End the first batch with one sentence: no retry can mend them."""

LOST = {
    "a generator that raises GeneratorExit": _generator_that_raises,
    "a list whose length raises": lambda completions: BadLength([1.0 for _ in completions]),
    "a tensor without numbers": lambda completions: torch.ones(len(completions), device="meta"),
    "an object whose attributes raise": lambda completions: Moody(),
}
"""Lose the whole batch."""

FINE = {
    "a generator": (_generator, 1.0),
    "a map": (lambda completions: map(float, [1] * len(completions)), 1.0),
    "booleans": (lambda completions: [True for _ in completions], 1.0),
    "decimals": (lambda completions: [decimal.Decimal("0.5") for _ in completions], 0.5),
    "fractions": (lambda completions: [fractions.Fraction(1, 4) for _ in completions], 0.25),
    "an object array": (lambda completions: np.array([1.0] * len(completions), dtype=object), 1.0),
    "a tensor with a gradient": (lambda completions: torch.ones(len(completions), requires_grad=True), 1.0),
}
"""Odd, and a score all the same."""


# -- what is done besides --------------------------------------------------------------------------------------------------


def _does(work):
    def call(completions, **columns):
        work(completions, columns)
        return [1.0 for _ in completions]

    return call


def _prints(completions, columns):
    sys.stdout.write("a reward speaks\n")


async def _leaves_tasks(completions):
    for _ in range(3):
        asyncio.get_running_loop().create_task(asyncio.sleep(3600))
    return [1.0 for _ in completions]


async def _leaves_a_task_that_exits(completions):
    async def leave():
        sys.exit(1)

    asyncio.get_running_loop().create_task(leave())
    await asyncio.sleep(0.01)
    return [1.0 for _ in completions]


async def _stops_the_loop(completions):
    asyncio.get_running_loop().stop()
    return [1.0 for _ in completions]


def _forgets(completions, columns):
    for values in columns.values():
        if isinstance(values, list):
            values.clear()
    completions.clear()
    completions += ["4", "bad", "5", ""]


def _logs_objects(completions, columns):
    columns["log_extra"]("what", [UnspeakableError() for _ in completions])


def _tears_at_the_state(completions, columns):
    state = columns["trainer_state"]
    if state is not None:
        state.max_steps = 0
        state.log_history.clear()


ON_THE_SIDE = {
    "prints": _does(_prints),
    "changes the directory": _does(lambda c, k: os.chdir("/")),
    "default dtype": _does(lambda c, k: torch.set_default_dtype(torch.float64)),
    "default device": _does(lambda c, k: torch.set_default_device("meta")),
    "gradient mode": _does(lambda c, k: torch.set_grad_enabled(False)),
    "threads of torch": _does(lambda c, k: torch.set_num_threads(torch.get_num_threads() + 1)),
    "deterministic mode": _does(lambda c, k: torch.use_deterministic_algorithms(True)),
    "closes standard output": _does(lambda c, k: setattr(sys, "stdout", None)),
    "replaces standard error": _does(lambda c, k: setattr(sys, "stderr", io.StringIO())),
    "stops the collector": _does(lambda c, k: gc.disable()),
    "seeds": _does(lambda c, k: random.seed(0)),
    "clears its inputs": _does(_forgets),
    "logs what cannot be shown": _does(_logs_objects),
    "tears at the state": _does(_tears_at_the_state),
    "starts a thread": _does(lambda c, k: threading.Thread(target=time.sleep, args=(1,), daemon=True).start()),
    "leaves tasks": _leaves_tasks,
    "leaves a task that exits": _leaves_a_task_that_exits,
    "stops the event loop": _stops_the_loop,
}
"""Score 1 and disturb what is not theirs."""


# -- in worker processes -----------------------------------------------------------------------------------------------------


@reward(isolated=True)
def isolated_base(completions):
    return raising(OwnBase)(completions)


@reward(isolated=True)
def isolated_interrupt(completions):
    return raising(KeyboardInterrupt)(completions)


@reward(isolated=True)
def isolated_unspeakable(completions):
    return raising(UnspeakableBase)(completions)


@reward(isolated=True)
def isolated_huge(completions):
    return [10**5000 if c == "bad" else 1 for c in completions]


@reward(isolated=True)
def isolated_death(completions):
    if "bad" in completions:
        os.kill(os.getpid(), signal.SIGKILL)
    return [1.0 for _ in completions]


@reward(isolated=True)
def isolated_leave(completions):
    if "bad" in completions:
        os._exit(0)
    return [1.0 for _ in completions]


@reward(isolated=True)
def isolated_endless(completions):
    return itertools.repeat(1.0)


ISOLATED = {
    "own BaseException": isolated_base,
    "KeyboardInterrupt": isolated_interrupt,
    "a text that raises": isolated_unspeakable,
    "a huge int": isolated_huge,
    "killed": isolated_death,
    "left": isolated_leave,
}
"""Lose the score of "bad" and no other, from their worker process."""
