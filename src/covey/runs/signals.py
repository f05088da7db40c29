"""Signals ask for a stop at the next step; a second Ctrl-C stops at once."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

PREEMPTED = 75
"""EX_TEMPFAIL: saved, please start the same command again."""
_SAME_PRESS_SECONDS = 0.5
_TIMER = getattr(signal, "SIGRTMAX", None)
"""The signal of `rewards.alarm`; macOS has none."""


class StopRequest:
    """While entered, SIGTERM, SIGINT and SIGUSR1 set `requested` instead of ending the process; the loop reads it.

    Only a second Ctrl-C (SIGINT) ends the process at once, with 130: it is a person who does not want to wait. Any other
    second signal changes nothing, for schedulers and launchers send several kinds for one stop, and SIGKILL when they lose
    patience. Launchers also forward a SIGINT that the process has already received itself, so one that follows within half
    a second counts as the same. SIGHUP, a terminal that was closed, is ignored meanwhile, unless something handles it.

    Where several runs share a process, `for_all` makes one request theirs: those that are entered inside install nothing.

    Handlers that were there before are called too and put back on leaving; a signal that was ignored stays ignored. Off the
    main thread, where Python permits no handlers, nothing is installed. A child process made by fork falls back to what was
    there before.

    Example: `with StopRequest() as stop: ...; sys.exit(stop.exit_code)`.
    """

    _of_all: StopRequest | None = None
    """The request that every other one in this process listens to; None: each listens to signals itself."""

    def __init__(self, names: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGUSR1")) -> None:
        self.signal: signal.Signals | None = None
        """The first signal received; None: none yet."""
        self._signals = [signal.Signals[name] for name in names]
        self._before: dict[signal.Signals, Any] = {}
        self._timer: Any = None
        """Handler of the signal that ends rewards past their time limit, before any did."""
        self._owner = os.getpid()
        self._interrupted_at: float | None = None
        self._heard_by: StopRequest | None = None
        """The request of all runs, when this is one of theirs."""

    @property
    def requested(self) -> bool:
        """True if a signal asked to stop."""
        if self.signal is None and self._heard_by is not None and self._heard_by.requested:
            self.signal = self._heard_by.signal
        return self.signal is not None

    @contextmanager
    def for_all(self) -> Iterator[None]:
        """While entered, requests that are entered listen to this one instead of to signals. They may end in any order."""
        before, StopRequest._of_all = StopRequest._of_all, self
        try:
            yield
        finally:
            StopRequest._of_all = before

    @property
    def name(self) -> str | None:
        """`SIGINT`, `SIGTERM` ...; None: nothing asked."""
        return None if self.signal is None else self.signal.name

    @property
    def exit_code(self) -> int:
        """After a clean stop with a checkpoint: 130 for Ctrl-C, 75 for the others (a scheduler requeues), 0 for none."""
        if self.signal is None:
            return 0
        return 128 + signal.SIGINT if self.signal is signal.SIGINT else PREEMPTED

    def adopt(self, names: Iterable[Sequence[str | None]]) -> None:
        """Where this process received none, take over the first signal of those that the processes of the run received."""
        received = [name for part in names for name in part if name is not None]
        self.signal = self.signal or (signal.Signals[received[0]] if received else None)

    def leave(self) -> None:
        """End a script as it was asked to: KeyboardInterrupt for Ctrl-C, SystemExit for the others, nothing without a signal."""
        if self.signal is signal.SIGINT:
            # PyTorch imports it at exit, where there is one, and an import there makes Python end with 1, not by the signal
            with suppress(ImportError):
                importlib.import_module("tabulate")
            raise KeyboardInterrupt
        if self.signal is not None:
            raise SystemExit(self.exit_code)

    def __enter__(self) -> StopRequest:
        self._owner = os.getpid()
        if StopRequest._of_all is not None:
            self._heard_by = StopRequest._of_all
            return self
        if threading.current_thread() is threading.main_thread():
            self._timer = signal.getsignal(_TIMER) if _TIMER is not None else None
            for number in self._signals:
                before = signal.getsignal(number)
                if (
                    before is not signal.SIG_IGN and before is not None
                ):  # None: not set from Python, not ours to replace
                    self._before[number] = before
                    signal.signal(number, self._receive)
            if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
                self._before[signal.SIGHUP] = signal.SIG_DFL
                # not a handler: rewards in processes of their own inherit it
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return self

    def __exit__(self, *error: object) -> None:
        if os.getpid() == self._owner:
            for number, before in self._before.items():
                signal.signal(number, before)
            if self._timer is not None and _TIMER is not None:
                signal.signal(_TIMER, self._timer)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(signal.Signals(number), signal.SIG_DFL)
        if os.getpid() != self._owner:
            signal.signal(number, before)
            os.kill(os.getpid(), number)
            return
        if self.signal is None:
            self.signal = signal.Signals(number)
            if callable(before) and before is not signal.default_int_handler:
                before(number, frame)
        if number == signal.SIGINT:
            now = time.monotonic()
            self._interrupted_at = now if self._interrupted_at is None else self._interrupted_at
            if now - self._interrupted_at > _SAME_PRESS_SECONDS:
                os._exit(128 + number)
