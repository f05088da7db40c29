"""Weights of a vLLM server that writes ahead: a thread of the training process asks it, while the learner updates."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from covey.process.world import World
from covey.rollout.vllm.sampler import ServerSampler
from covey.rollout.vllm.sync import Update
from covey.rollout.worker import Order
from covey.rollout.worker_process import Tell


class ServedWeights:
    """Weights on their way to a server: gathered and written where they are published, sent between two orders, never within one.

    The `Source` of a `covey.rollout.thread_worker.ThreadWorker`.
    """

    def __init__(self, server: ServerSampler, *, takes_newest: bool) -> None:
        """`takes_newest` False: each order is written by the oldest weights that it allows."""
        self.server, self.takes_newest = server, takes_newest
        self.waiting: deque[Update] = deque()
        self.version = -1
        """Version of the weights that were taken last; -1: none."""
        self.lock = threading.Lock()

    def collect(self, policy: Any, version: int) -> Any:
        """Prepare an update with the current weights of `policy`, which is returned. Of a split model all processes take part."""
        update = self.server.prepare(policy, version)
        with self.lock:
            if self.takes_newest or (self.waiting and version < self.waiting[-1].version):  # or the run went back
                self.waiting.clear()
            self.waiting.append(update)
        return policy

    def attach(self, tell: Tell, check_open: Callable[[], None]) -> None:
        self.tell, self.version = tell, -1  # the run may have gone back to earlier weights
        self.server.world = World()  # the other processes take no part in what the thread does
        self.server.check_stop = self.server.check_wait = check_open
        self.server.agree = self.server.world.any

    def begin(self, order: Order) -> None:
        """Load the weights of an order, if the server has older ones."""
        if (version := self.take(order.at_least)) is not None:
            self.tell(("took", version, time.monotonic()))

    def publish(self, version: int) -> bool:
        """True: `collect` has prepared them."""
        return True

    def end(self) -> None:
        """The server goes on."""

    def take(self, at_least: int) -> int | None:
        """Load the newest update, or the oldest of at least this version; its version, None if the server keeps what it has."""
        taken: Update | None = None
        with self.lock:
            while self.waiting and (self.takes_newest or self.version < at_least):
                taken = self.waiting.popleft()
                self.version = taken.version
        if taken is None:
            return None
        self.server.load_prepared(taken)
        return taken.version
