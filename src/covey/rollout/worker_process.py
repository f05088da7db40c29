"""Proxy of a sampler process in the training process: start, weights through shared memory, messages."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from covey.errors import CoveyError
from covey.rollout.worker import Order, Setup, layout, packed, views

Tell = Callable[[tuple[Any, ...]], None]
"""Message callback, called from any thread with ("ready", t), ("took", version, t), ("began", number, t), ("group", number, Group),
("done", number, t), ("failed", error) or ("gone", words); t in seconds of `time.monotonic`."""


class Worker(Protocol):
    """A remote sampler: a process, or an actor on another machine."""

    def publish(self, version: int) -> bool:
        """Publish the current weights. Returns False, without effect, while the worker has not taken the previous ones."""
        ...

    def send(self, order: Order) -> None:
        """Queue an order for groups."""
        ...

    def close(self) -> None:
        """Terminate the worker; unfinished groups are lost."""
        ...


def trained(model: Any) -> dict[str, Tensor]:
    """Trainable weights by name; with an adapter, only the adapter's."""
    return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


class ProcessWorker:
    """A worker process on this machine. New weights go through shared memory."""

    def __init__(self, model: Any, tokenizer: Any, version: int, setup: Setup, tell: Tell) -> None:
        """Start the process with the current model. Raises ModelError for a model that cannot be pickled."""
        content, self.model, self.tell = packed(model, tokenizer), model, tell
        weights = trained(model)
        shapes = {name: (tuple(value.shape), value.dtype) for name, value in weights.items()}
        folder = _roomy(layout(shapes)[1])
        with tempfile.TemporaryDirectory(prefix="covey-weights-", dir=folder) as own:
            path = str(Path(own) / "weights")
            self.shared = views(path, shapes)
            mine, theirs = Pipe()
            self.process = _start(theirs)
            self.connection: Connection = mine
            self.is_free, self.is_closed = True, False
            self.asked_at = time.monotonic()
            try:
                mine.send({"weights": path, "shapes": shapes, "setup": setup, "version": version})
                mine.send_bytes(content)
                first = mine.recv()
            except (EOFError, OSError) as error:
                self.close()
                raise CoveyError(
                    f"the process that samples ended while it started (exit code {self.process.poll()}); is there memory for a "
                    "second copy of the model?"
                ) from error
        if first[0] == "failed":
            self.close()
            raise _error(first)
        threading.Thread(target=self._hear, name="covey-sampler", daemon=True).start()

    def publish(self, version: int) -> bool:
        """Copy the weights into the shared memory and notify the worker; see `Worker`."""
        if not self.is_free:
            return False
        for name, value in trained(self.model).items():
            self.shared[name].copy_(value)
        self.is_free = False
        self._send(version)
        return True

    def send(self, order: Order) -> None:
        self._send(order)

    def close(self) -> None:
        self.is_closed = True
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            self.connection.close()

    def _send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the listener thread reports its end
            self.connection.send(message)

    def _hear(self) -> None:
        try:
            while True:
                message = self.connection.recv()
                if message[0] == "took":
                    self.is_free = True
                if message[0] == "group":
                    message = (*message[:2], pickle.loads(message[2]))  # trusted: from a process that this run started
                if message[0] == "failed":
                    self.tell(("failed", _error(message)))
                    return
                self.tell(message)
        except (EOFError, OSError, TypeError):  # TypeError: this process has closed it meanwhile
            if not self.is_closed:
                self.tell(("gone", f"the process that samples ended with exit code {self.process.wait()}"))


def _start(theirs: Connection) -> subprocess.Popen[bytes]:
    package = str(Path(__file__).parents[2])
    search = os.pathsep.join(filter(None, [package, *sys.path, os.environ.get("PYTHONPATH", "")]))
    with theirs:
        return subprocess.Popen(
            [sys.executable, "-m", "covey.rollout.worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "PYTHONPATH": search},
            start_new_session=True,  # Ctrl-C is handled by the training process
        )


def _error(message: tuple[Any, ...]) -> CoveyError:
    """Cause of the worker's end: the original exception if Covey raised it."""
    _, kind, said, known, told = message
    error = known(said) if known is not None else CoveyError(f"the process that samples ended with {kind}: {said}")
    error.__cause__ = Exception(f"in the process that samples:\n{told}")
    return error


def _roomy(size: int) -> str | None:
    """A folder on a RAM disk with `size` bytes free; None: the system's folder for temporary files."""
    memory = Path("/dev/shm")
    is_usable = memory.is_dir() and os.access(memory, os.W_OK)
    return str(memory) if is_usable and shutil.disk_usage(memory).free > 2 * size else None


def halves(threads: int) -> tuple[int, int]:
    """Intra-op threads of the learner and of the worker, half each."""
    return max(1, threads - threads // 2), max(1, threads // 2)
