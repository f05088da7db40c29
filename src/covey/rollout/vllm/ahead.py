"""A vLLM server as a worker of asynchronous rollouts: a thread of the training process that asks it, while the learner updates."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import Any

from covey.errors import CoveyError
from covey.process.world import World
from covey.rollout.sampler import Sampler, sampler_metrics
from covey.rollout.vllm.sampler import ServerSampler
from covey.rollout.vllm.sync import Update
from covey.rollout.worker import Order
from covey.rollout.worker_process import Tell


class _ClosedError(Exception):
    """The worker was closed while it wrote."""


class ServedWeights:
    """Weights on their way to a server: gathered and written where they are published, sent between two orders."""

    def __init__(self, server: ServerSampler, *, takes_newest: bool) -> None:
        """`takes_newest` False: each order is written by the oldest weights that it allows."""
        self.server, self.takes_newest = server, takes_newest
        self.waiting: deque[Update] = deque()
        self.lock = threading.Lock()

    def collect(self, policy: Any, version: int) -> Any:
        """Prepare an update with the current weights of `policy`, which is returned. Of a split model all processes take part."""
        update = self.server.prepare(policy, version)
        with self.lock:
            if self.takes_newest:
                self.waiting.clear()
            self.waiting.append(update)
        return policy

    def take(self, at_least: int) -> int | None:
        """Load the newest update, or the oldest of at least this version; its version, None if there is no newer one."""
        taken: Update | None = None
        with self.lock:
            while self.waiting and (self.takes_newest or taken is None or taken.version < at_least):
                taken = self.waiting.popleft()
        if taken is None:
            return None
        self.server.load_prepared(taken)
        return taken.version


class ThreadWorker:
    """A worker in a thread; see `covey.rollout.worker_process.Worker`. The weights change between two orders, never within one."""

    def __init__(self, sampler: Sampler, weights: ServedWeights, tell: Tell) -> None:
        """`sampler`: draws from `weights.server`, which it may wrap."""
        self.sampler, self.weights, self.tell = sampler, weights, tell
        weights.server.world = World()  # the other processes take no part in what this thread does
        self.orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self.is_closed = False
        weights.server.check_stop = weights.server.check_wait = self._expect_open
        self.thread = threading.Thread(target=self._work, name="covey-served", daemon=True)
        self.thread.start()

    def publish(self, version: int) -> bool:
        """True: `ServedWeights.collect` has prepared them."""
        return True

    def send(self, order: Order) -> None:
        self.orders.put(order)

    def close(self) -> None:
        """Abort the requests, but finish an update of the server's weights that has begun."""
        self.is_closed = True
        self.orders.put(None)
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def _expect_open(self) -> None:
        if self.is_closed:
            raise _ClosedError

    def _work(self) -> None:
        try:
            while (order := self.orders.get()) is not None:
                self._expect_open()
                if (version := self.weights.take(order.at_least)) is not None:
                    self.tell(("took", version, time.monotonic()))
                self.tell(("began", order.number, time.monotonic()))
                for group in self.sampler.sample(order.prompts, order.n, order.params):
                    self.tell(
                        ("measured", sampler_metrics(self.sampler))
                    )  # first: the learner takes them with the groups
                    self.tell(("group", order.number, group))
                self.tell(("measured", sampler_metrics(self.sampler)))
                self.tell(("done", order.number, time.monotonic()))
        except _ClosedError:
            return
        except CoveyError as error:
            self.tell(("failed", error))
        except Exception as error:  # noqa: BLE001 - raised by the training process
            failed = CoveyError(f"the thread that samples ended with {type(error).__name__}: {error}")
            failed.__cause__ = error
            self.tell(("failed", failed))
