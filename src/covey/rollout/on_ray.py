"""A sampler worker as a Ray actor, on this machine or another."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from covey.errors import CoveyError, first_line
from covey.process.cluster import connected
from covey.rollout.sampler import update_metrics
from covey.rollout.worker import Order, Setup, Writer
from covey.rollout.worker_process import Tell, trained

logger = logging.getLogger(__name__)

RAY_OPTION = ("rollout_placement='ray'", "leave it out for a process")
"""Option that asks for Ray, and its alternative, for errors."""
_LOOK_SECONDS = 0.002
_SLOW_SECONDS = 60.0
"""Wait for an actor after which the log says why: Ray queues it silently until the cluster has room."""


class Actor:
    """Body of the Ray actor: one thread generates orders in turn, another receives new weights."""

    def __init__(self, content: bytes, setup: Setup, version: int) -> None:
        self.waiting: deque[tuple[int, Mapping[str, Tensor]]] = deque()
        self.took: list[int] = []
        self.takes_newest = setup.takes_newest
        self.writer = Writer(content, setup, version, self._newest)

    def process_id(self) -> int:
        return os.getpid()

    def put(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Queue weights for the next group or token boundary. Those still waiting are dropped, unless each order has its own."""
        if self.takes_newest:
            self.waiting.clear()
        self.waiting.append((version, weights))

    def write(self, order: Order) -> Iterator[bytes]:
        """("took", version), ("began",), ("group", group) and ("done",), pickled, as they occur."""
        while self.writer.version < order.at_least:
            self.writer.take_newest()
            time.sleep(_LOOK_SECONDS)
        yield pickle.dumps(("began",))
        for group in self.writer.write(order):
            while self.took:
                yield pickle.dumps(("took", self.took.pop(0)))
            yield pickle.dumps(("group", group))
        yield pickle.dumps(("done",))

    def _newest(self) -> tuple[int, Mapping[str, Tensor]] | None:
        with contextlib.suppress(IndexError):  # `put` runs in another thread
            newest = self.waiting.popleft()
            self.took.append(newest[0])
            return newest
        return None


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
        made = ray.remote(max_concurrency=2, **self.needs)(Actor)
        self.actor = made.remote(ray.put(content), setup, version)
        self.orders: queue.Queue[Order | None] = queue.Queue()
        threading.Thread(target=self._work, name="covey-ray", daemon=True).start()

    def publish(self, version: int) -> bool:
        """Put the weights into Ray's object store; the actor takes them at its next group or token boundary."""
        started = time.perf_counter()
        weights = {name: value.cpu().clone() for name, value in trained(self.model).items()}
        self.actor.put.remote(version, self.ray.put(weights))
        sent = sum(value.nbytes for value in weights.values())
        self.tell(("measured", update_metrics(time.perf_counter() - started, sent)))
        return True

    def send(self, order: Order) -> None:
        self.orders.put(order)

    def close(self) -> None:
        self.is_closed = True
        self.orders.put(None)
        with contextlib.suppress(self.ray.exceptions.RayError):
            self.ray.kill(self.actor, no_restart=True)

    def _work(self) -> None:
        try:
            self._await_start()
            while (order := self.orders.get()) is not None:
                for reference in self.actor.write.options(num_returns="streaming").remote(order):
                    message = pickle.loads(self.ray.get(reference))  # trusted: from an actor that this run started
                    self._say(order.number, message)
        except self.ray.exceptions.RayTaskError as error:
            self._end("failed", _plain(error))
        except self.ray.exceptions.RayError as error:
            if self.process_id is None:
                self._end("failed", CoveyError(f"Ray could not start an actor that samples: {first_line(error)}"))
            else:
                self._end("gone", f"the actor that samples ended ({first_line(error)})")

    def _await_start(self) -> None:
        reference = self.actor.process_id.remote()
        if not self.ray.wait([reference], timeout=_SLOW_SECONDS)[0] and not self.is_closed:
            logger.warning(_not_started(self.needs, self.ray.available_resources()))
        self.process_id = self.ray.get(reference)

    def _end(self, kind: str, why: CoveyError | str) -> None:
        if not self.is_closed:
            self.tell((kind, why))

    def _say(self, number: int, message: tuple[Any, ...]) -> None:
        now = time.monotonic()  # clocks of other machines are not comparable
        match message:
            case ("group", group):
                self.tell(("group", number, group))
            case ("took", version):
                self.tell(("took", version, now))
            case (what,):
                self.tell((what, number, now))


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
