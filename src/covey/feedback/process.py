"""Client of the training process in the endpoint: start, requests, end."""

import contextlib
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from covey.errors import CoveyError
from covey.feedback.settings import Settings
from covey.feedback.worker import Made, Order
from covey.process.spawner import start_module

_LOOK_SECONDS = 1.0
"""Time between looks at the process while it works."""


class Learning:
    """The process that trains, from its start to `close`."""

    def __init__(self, settings: Settings) -> None:
        """Start it and wait until it has loaded the model. Raises CoveyError with its own words where it cannot."""
        mine, theirs = Pipe()
        self.connection: Connection = mine
        self.is_closed = False
        self.process = _start(theirs)
        self._ask(settings)

    def make(self, order: Order) -> Made:
        """Train a candidate and compare it. Raises CoveyError where that fails or the process ends."""
        made: Made = self._ask(order)[1]
        return made

    def close(self) -> None:
        """Kill the process; its unfinished training is lost."""
        self.is_closed = True
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            self.connection.close()

    def _ask(self, message: Any) -> tuple[Any, ...]:
        try:
            self.connection.send(message)
            while not self.connection.poll(_LOOK_SECONDS):  # a process of its own may hold the other end open
                if self.process.poll() is not None and not self.connection.poll():
                    raise EOFError
            answer: tuple[Any, ...] = self.connection.recv()
        except (EOFError, OSError, TypeError) as error:  # TypeError: closed meanwhile by this process
            code = self.process.wait()
            raise CoveyError(f"the process that learns ended with exit code {code}") from error
        if answer[0] == "failed":
            raised = CoveyError(f"the process that learns failed: {answer[2]}")
            raise raised from Exception(f"in the process that learns:\n{answer[3]}")
        return answer


def _start(theirs: Connection) -> subprocess.Popen[bytes]:
    with theirs:
        return start_module("covey.feedback.worker", [theirs.fileno()], [theirs.fileno()], sys.path)
