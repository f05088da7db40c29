"""Settings that a whole process shares and training relies on, put back after a reward that changed it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from covey.process.ordered_sums import ordered_sums

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
