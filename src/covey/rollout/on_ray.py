"""A sampler worker as a Ray actor, on this machine or another."""

import contextlib
import logging
import os
import pickle
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from covey.errors import CoveyError, first_line
from covey.process.cluster import connected
from covey.rollout.sampler import update_metrics
from covey.rollout.worker import Served, Setup, ToWorker
from covey.rollout.worker_process import Tell, decoded, trained

logger = logging.getLogger(__name__)

RAY_OPTION = ("rollout_placement='ray'", "leave it out for a process")
"""Option that asks for Ray, and its alternative, for errors."""
_SLOW_SECONDS = 60.0
"""Wait for an actor after which the log says why: Ray queues it silently until the cluster has room."""


class Queues:
    """The line of an actor; see `covey.rollout.worker.Line`."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.recv, self.send = self.inbox.get, self.outbox.put

    def poll(self) -> bool:
        return not self.inbox.empty()

    def put(self, kind: str, *content: Any) -> None:
        """A message that arrives."""
        self.inbox.put((kind, content if kind == "weights" else content[0]))


class Actor:
    """Body of the Ray actor: one thread serves what arrives, others take it in and give messages out."""

    def __init__(self, content: bytes, setup: Setup, version: int) -> None:
        self.line = Queues()
        self.served = Served(self.line, content, setup, version, lambda announced: announced)
        threading.Thread(target=self._serve, name="covey-served", daemon=True).start()

    def process_id(self) -> int:
        return os.getpid()

    def put(self, kind: str, *content: Any) -> None:
        """A message to the actor. Tensors are an argument of their own, which Ray fetches."""
        self.line.put(kind, *content)

    def messages(self) -> Iterator[tuple[Any, ...]]:
        """Messages of the actor as they come. Raises the error that ends it."""
        while True:
            message = self.line.outbox.get()
            if isinstance(message, BaseException):
                raise message
            yield message

    def _serve(self) -> None:
        try:
            self.served.serve()
        except BaseException as error:  # noqa: BLE001 - raised by `messages`
            self.line.outbox.put(error)


class RayWorker:
    """Proxy of the Ray actor in the training process; see `covey.rollout.worker_process.Worker`."""

    def __init__(self, model: Any, content: bytes, version: int, setup: Setup, tell: Tell) -> None:
        """Request an actor with `content` (the current model, `packed`), without waiting for it, so that a run can be stopped meanwhile.

        In the cluster of RAY_ADDRESS, or in one on this machine. Raises ConfigError without Ray.
        """
        ray = connected(*RAY_OPTION)
        self.ray, self.model, self.tell, self.is_closed = ray, model, tell, False
        self.process_id: int | None = None
        """Process of the actor; None: it has not started."""
        self.needs = {"num_gpus": 1} if setup.device.startswith("cuda") else {"num_cpus": setup.threads}
        made = ray.remote(concurrency_groups={"in": 1, "out": 1}, **self.needs)(Actor)
        self.actor = made.remote(ray.put(content), setup, version)
        self.put = self.actor.put.options(concurrency_group="in")  # one thread: messages arrive in their order
        self.is_free = True
        threading.Thread(target=self._work, name="covey-ray", daemon=True).start()

    def publish(self, version: int) -> bool:
        """Put the weights into Ray's object store; the actor takes them at its next group or token boundary."""
        if not self.is_free:
            return False
        self.is_free = False
        started = time.perf_counter()
        weights = {name: value.cpu().clone() for name, value in trained(self.model).items()}
        self.put.remote("weights", version, self.ray.put(weights))
        sent = sum(value.nbytes for value in weights.values())
        self.tell(("measured", update_metrics(time.perf_counter() - started, sent)))
        return True

    def send(self, message: ToWorker) -> None:
        self.put.remote("message", pickle.dumps(message))

    def close(self) -> None:
        self.is_closed = True
        with contextlib.suppress(self.ray.exceptions.RayError):
            self.ray.kill(self.actor, no_restart=True)

    def _work(self) -> None:
        try:
            self._await_start()
            for reference in self._messages():
                self._say(decoded(self.ray.get(reference)))
        except self.ray.exceptions.RayTaskError as error:
            self._end("failed", _plain(error))
        except self.ray.exceptions.RayError as error:
            if self.process_id is None:
                self._end("failed", CoveyError(f"Ray could not start an actor that samples: {first_line(error)}"))
            else:
                self._end("gone", f"the actor that samples ended ({first_line(error)})")
        except Exception as error:  # noqa: BLE001 - raised by the learner, which would wait for ever
            self._end(
                "failed",
                CoveyError(f"the actor that samples cannot be read ({type(error).__name__}: {first_line(error)})"),
            )

    def _messages(self) -> Any:
        return self.actor.messages.options(num_returns="streaming", concurrency_group="out").remote()

    def _await_start(self) -> None:
        reference = self.actor.process_id.remote()
        if not self.ray.wait([reference], timeout=_SLOW_SECONDS)[0] and not self.is_closed:
            logger.warning(_not_started(self.needs, self.ray.available_resources()))
        self.process_id = self.ray.get(reference)

    def _end(self, kind: str, why: CoveyError | str) -> None:
        if not self.is_closed:
            self.tell((kind, why))

    def _say(self, message: tuple[Any, ...]) -> None:
        if message[0] == "took":
            self.is_free = True
        if message[0] in ("ready", "took", "began", "done"):  # clocks of other machines are not comparable
            message = (*message[:-1], time.monotonic())
        self.tell(message)


def _not_started(needs: Mapping[str, int], free: Mapping[str, float]) -> str:
    """Sentence about an actor that has not started yet, by what the cluster has free."""
    name, number = next(iter(needs.items()))
    kind = name.removeprefix("num_").removesuffix("s").upper()
    left = free.get(kind, 0.0)
    why = f"the cluster has {left:g} {kind} free and it needs {number}; add machines, end other jobs, or lower rollout_workers"
    slow = "the cluster has room for it, so its machine is slow to start a process"
    return f"An actor that samples has not started after {_SLOW_SECONDS:.0f} s: {why if left < number else slow}."


def _plain(error: Any) -> CoveyError:
    """Error of the actor: the original exception if Covey raised it."""
    cause = error.cause
    if isinstance(cause, CoveyError):
        return cause
    return CoveyError(f"the actor that samples ended with {type(cause).__name__}: {first_line(cause)}")
