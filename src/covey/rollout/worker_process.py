"""Proxy of a sampler process in the training process: start, weights through shared memory, messages."""

import contextlib
import os
import pickle
import queue
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

from torch import Tensor, nn

from covey.errors import CoveyError, first_line
from covey.process.spawner import start_module
from covey.rollout.model_copies import layout, views
from covey.rollout.sampler import update_metrics
from covey.rollout.worker import Order, Setup, ToWorker

Tell = Callable[[tuple[Any, ...]], None]
"""Message callback, called from any thread with ("ready", t), ("took", version, t), ("began", number, t), ("group", number, Group),
("done", number, t), ("turns", list of Turn), ("answered", number, Group), ("measured", metrics), ("failed", error) or ("gone", words);
t in seconds of `time.monotonic`."""


_END_SECONDS = 10.0
"""Seconds in which a process whose connection broke must end."""


class Worker(Protocol):
    """A remote sampler: a process, or an actor on another machine."""

    def publish(self, version: int) -> bool:
        """Publish the current weights. Returns False, without effect, while the worker has not taken the previous ones."""

    def send(self, order: Order) -> None:
        """Queue an order for groups."""

    def close(self) -> None:
        """Terminate the worker; unfinished groups are lost."""


class AskingWorker(Worker, Protocol):
    """A worker that asks for the replies of an environment, and answers single calls."""

    def send(self, message: ToWorker) -> None:
        """Queue an order or a call, or reply to the order that asked."""


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Trainable weights by name; with an adapter, only the adapter's."""
    return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


class ProcessWorker:
    """A worker process on this machine. New weights go through shared memory."""

    def __init__(self, model: nn.Module, content: bytes, version: int, setup: Setup, tell: Tell) -> None:
        """Start the process with `content` (the current model, `packed`), without waiting until it is ready."""
        self.model, self.tell = model, tell
        weights = trained(model)
        shapes = {name: (tuple(value.shape), value.dtype) for name, value in weights.items()}
        folder = _roomy(layout(shapes)[1])
        self.folder = tempfile.TemporaryDirectory(prefix="covey-weights-", dir=folder)
        path = str(Path(self.folder.name) / "weights")
        self.shared = views(path, shapes)
        self.connection, theirs = Pipe()
        self.process = _start(theirs)
        self.is_free, self.is_closed = True, False
        self.outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.outbox.put({"weights": path, "shapes": shapes, "setup": setup, "version": version})
        self.outbox.put(content)
        threading.Thread(target=self._speak, name="covey-sampler-out", daemon=True).start()
        threading.Thread(target=self._hear, name="covey-sampler", daemon=True).start()

    def publish(self, version: int) -> bool:
        """Copy the weights into the shared memory and notify the worker; see `Worker`."""
        if not self.is_free:
            return False
        started = time.perf_counter()
        for name, value in trained(self.model).items():
            self.shared[name].copy_(value)
        sent = sum(value.nbytes for value in self.shared.values())
        self.tell(("measured", update_metrics(time.perf_counter() - started, sent)))
        self.is_free = False
        self.outbox.put(("weights", version))
        return True

    def send(self, message: ToWorker) -> None:
        self.outbox.put(("message", pickle.dumps(message)))  # torch would send file descriptors of tensors instead

    def close(self) -> None:
        self.is_closed = True
        self.outbox.put(None)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            self.connection.close()

    def _speak(self) -> None:
        """Send what is in the outbox; the process reads the first messages once it has imported torch."""
        try:
            while (message := self.outbox.get()) is not None:
                if isinstance(message, bytes):
                    self.connection.send_bytes(message)
                else:
                    self.connection.send(message)
        except OSError:
            return  # the listener thread reports the process's end
        except Exception as error:  # noqa: BLE001 - raised by the learner
            self._fail("written to", error)

    def _hear(self) -> None:
        has_started = False
        try:
            with self.folder:  # the process has mapped the file by its first message
                message = self.connection.recv()
            while message[0] != "failed":
                has_started = True
                if message[0] == "took":
                    self.is_free = True
                self.tell(decoded(message))
                message = self.connection.recv()
            self.tell(("failed", _error(message)))
        except (EOFError, OSError):
            if not self.is_closed:
                self.tell(self._gone() if has_started else self._never_started())
        except Exception as error:  # noqa: BLE001 - raised by the learner, which would wait for ever
            self._fail("read", error)

    def _fail(self, done: str, error: Exception) -> None:
        if not self.is_closed:  # otherwise the connection was closed meanwhile
            failed = CoveyError(
                f"the process that samples cannot be {done} ({type(error).__name__}: {first_line(error)})"
            )
            failed.__cause__ = error
            self.tell(("failed", failed))

    def _exit_code(self) -> int:
        """Exit code of a process whose connection broke; one that lives on is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(_END_SECONDS)
        self.process.kill()
        return self.process.wait()

    def _gone(self) -> tuple[Any, ...]:
        return ("gone", f"the process that samples ended with exit code {self._exit_code()}")

    def _never_started(self) -> tuple[Any, ...]:
        code = self._exit_code()
        why = f"the process that samples ended while it started (exit code {code}); is there memory for a second copy of the model?"
        return ("failed", CoveyError(why))


def _start(theirs: Connection) -> subprocess.Popen[bytes]:
    with theirs:
        return start_module("covey.rollout.worker", [theirs.fileno()], [theirs.fileno()], sys.path)


def decoded(message: tuple[Any, ...]) -> tuple[Any, ...]:
    """A worker's message, for `Tell`."""
    if message[0] not in ("group", "turns", "answered"):
        return message
    return (*message[:-1], pickle.loads(message[-1]))  # trusted: from a worker that this run started


def _error(message: tuple[Any, ...]) -> CoveyError:
    """Cause of the worker's end: the original exception if Covey raised it."""
    _, kind, text, error_type, trace = message
    error = (
        error_type(text)
        if error_type is not None
        else CoveyError(f"the process that samples ended with {kind}: {text}")
    )
    error.__cause__ = Exception(f"in the process that samples:\n{trace}")
    return error


def _roomy(size: int) -> str | None:
    """A folder on a RAM disk with `size` bytes free; None: the system's folder for temporary files."""
    memory = Path("/dev/shm")
    is_usable = memory.is_dir() and os.access(memory, os.W_OK)
    return str(memory) if is_usable and shutil.disk_usage(memory).free > 2 * size else None


def halves(threads: int) -> tuple[int, int]:
    """Intra-op threads of the learner and of the worker, half each."""
    return max(1, threads - threads // 2), max(1, threads // 2)
