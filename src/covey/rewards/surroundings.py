"""Side effects of rewards: copies of their inputs, settings of the process, which are put back, un-awaited tasks, threads."""

from __future__ import annotations

import copy
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from covey.process.ordered_sums import ordered_sums
from covey.rewards.calling.state_log import LOG_NAMES, with_log
from covey.types import Event

_FIXED = frozenset({str, int, float, bool, bytes, complex, type(None)})
_SHARED = frozenset({"log_extra", "log_metric", "environments"})


def copied_inputs(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords with lists and dicts of their own, to any depth.

    Text and numbers are shared, since they are immutable; so a column of long texts costs one list. Lists and dicts are
    copied for each completion, as a data set gives them; an array, a tensor or another object once for each row.
    """
    memo: dict[int, Any] = {}
    return {name: value if name in _SHARED else _copy(value, memo) for name, value in keywords.items()}


def copied_state(trainer_state: Any) -> Any:
    """A copy of the trainer's state whose log, lists and dicts are its own; an object that cannot be copied as it is."""
    if trainer_state is None:
        return None
    try:
        rest = {name: _copy(value, {}) for name, value in vars(trainer_state).items() if name not in LOG_NAMES}
        return with_log(type(trainer_state), rest, getattr(trainer_state, "log_history", None))
    except Exception:  # noqa: BLE001 - a state of the caller's own making
        return trainer_state


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in _FIXED:
        return value
    if kind is list:
        return [item if type(item) in _FIXED else _copy(item, memo) for item in value]
    if kind is dict:
        return {key: item if type(item) in _FIXED else _copy(item, memo) for key, item in value.items()}
    if kind is tuple:
        return tuple(_copy(item, memo) for item in value)
    if id(value) not in memo:
        try:
            memo[id(value)] = copy.deepcopy(value)
        except Exception:  # noqa: BLE001 - a lock, an open file: it stays shared
            memo[id(value)] = value
    return memo[id(value)]


_Access = tuple[Callable[[], Any], Callable[[Any], object]]


def _directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _change_directory(before: str | None) -> None:
    if before is not None:
        os.chdir(before)


def _set_device(device: torch.device) -> None:
    torch.set_default_device(
        None if device.type == "cpu" else device
    )  # None: torch's own default, at no cost for each call


_PARTS: Mapping[str, _Access] = {
    "the working directory": (_directory, _change_directory),
    "standard output": (lambda: sys.stdout, lambda before: setattr(sys, "stdout", before)),
    "standard error": (lambda: sys.stderr, lambda before: setattr(sys, "stderr", before)),
    "garbage collection": (gc.isenabled, lambda before: gc.enable() if before else gc.disable()),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (torch.get_default_device, _set_device),
    "torch's gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's deterministic mode": (ordered_sums.mode, ordered_sums.set_mode),
    "torch's precision of products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
}
_SIGNALS = tuple(
    number for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if (number := getattr(signal, name, None))
)


@dataclass(frozen=True)
class Surroundings:
    """`Surroundings.now()` before the user's code, `put_back()` after it."""

    values: Mapping[str, Any]
    handlers: Mapping[Any, Any]
    process: int

    @staticmethod
    def now() -> Surroundings:
        handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        return Surroundings({name: read() for name, (read, _) in _PARTS.items()}, handlers, os.getpid())

    def put_back(self) -> list[str]:
        """Restore changed process-wide state. Returns the names of what was changed. A child that a reward forked ends here."""
        if os.getpid() != self.process:
            os._exit(1)  # `os.fork()` in a reward: two processes must not train on
        changed = []
        for name, (read, write) in _PARTS.items():
            if read() != self.values[name]:
                write(self.values[name])
                changed.append(name)
        if threading.current_thread() is threading.main_thread():
            for number, handler in self.handlers.items():
                if (
                    handler is not None
                    and signal.getsignal(number) is not handler
                    and signal.getsignal(number) != handler
                ):
                    signal.signal(number, handler)
                    changed.append(f"the handler of {signal.Signals(number).name}")
        return changed


logger = logging.getLogger(__name__)

_MANY_THREADS = 64


_OURS = ("covey-", "AnyIO ")
"""Beginnings of the names of threads that a run starts itself: agents, and the endpoint that they talk to."""


def _num_threads() -> int:
    return sum(not thread.name.startswith(_OURS) for thread in threading.enumerate())


class Leftovers:
    """Reports each kind of leftover once for each reward, as an event and as a warning."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str]] = set()
        self._threads = _num_threads()

    def events(self, changed: Iterable[tuple[str, str]], tasks: Mapping[str, int]) -> list[Event]:
        """Events for restored state (name of the reward or "", the name of the setting), cancelled tasks, and threads."""
        problems = [(name, "reward_side_effect", what, f"changed {what}, which was put back") for name, what in changed]
        problems += [
            (
                name,
                "reward_tasks_left",
                "tasks",
                f"left {count} task(s) running, which were cancelled; await what it starts",
            )
            for name, count in tasks.items()
        ]
        more = _num_threads() - self._threads
        if more >= _MANY_THREADS:
            phrase = f"left {more} threads running, which cannot be ended from outside; join what it starts"
            problems.append(("", "reward_threads_left", "threads", phrase))
        return [
            self._event_of(name, kind, what, phrase)
            for name, kind, what, phrase in problems
            if (name, what) not in self._reported
        ]

    def _event_of(self, name: str, kind: str, what: str, phrase: str) -> Event:
        self._reported.add((name, what))
        sentence = f"Reward {name!r} {phrase}." if name else f"A reward {phrase}."
        logger.warning("%s It is told once.", sentence)
        return Event(kind=kind, said=sentence, details={"reward": name})
