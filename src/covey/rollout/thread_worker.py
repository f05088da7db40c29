"""A worker in a thread of the training process: it draws orders from a sampler of elsewhere, while the learner updates."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from covey.errors import CoveyError
from covey.rollout.sampler import Sampler, close_sampler, sampler_metrics
from covey.rollout.worker import Order
from covey.rollout.worker_process import Tell


class _ClosedError(Exception):
    """The worker was closed while it wrote."""


class Source(Protocol):
    """Place where the weights of a thread's sampler are: a server, or a process."""

    def attach(self, tell: Tell, check_open: Callable[[], None]) -> None:
        """Begin. `check_open` is to be called wherever work waits; what it raises ends the wait."""

    def begin(self, order: Order) -> None:
        """Prepare the weights of an order; in the thread that draws."""

    def publish(self, version: int) -> bool:
        """See `covey.rollout.worker_process.Worker`."""

    def end(self) -> None: ...


class ThreadWorker:
    """A worker in a thread; see `covey.rollout.worker_process.Worker`."""

    def __init__(self, sampler: Sampler, source: Source, tell: Tell) -> None:
        """`sampler`: draws from `source`, which it may wrap."""
        self.sampler, self.source, self.tell = sampler, source, tell
        self.publish = source.publish
        self.orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self.is_closed = False
        self.thread = threading.Thread(target=self._work, name="covey-ahead", daemon=True)
        source.attach(tell, self._expect_open)
        self.thread.start()

    def send(self, order: Order) -> None:
        self.orders.put(order)

    def close(self) -> None:
        """End what is being written, but finish an update of a server's weights that has begun."""
        self.is_closed = True
        self.orders.put(None)
        self.source.end()
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def _expect_open(self) -> None:
        if self.is_closed:
            raise _ClosedError

    def _work(self) -> None:
        try:
            while (order := self.orders.get()) is not None:
                self._expect_open()
                self.source.begin(order)
                self._write(order)
        except _ClosedError:
            return
        except CoveyError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - raised by the training process
            failed = CoveyError(f"the thread that samples ended with {type(error).__name__}: {error}")
            failed.__cause__ = error
            self._fail(failed)
        finally:
            close_sampler(self.sampler)

    def _write(self, order: Order) -> None:
        self.tell(("began", order.number, time.monotonic()))
        for group in self.sampler.sample(order.prompts, order.n, order.params):
            self.tell(("measured", sampler_metrics(self.sampler)))  # first: the learner takes them with the groups
            self.tell(("group", order.number, group))
        self.tell(("measured", sampler_metrics(self.sampler)))
        self.tell(("done", order.number, time.monotonic()))

    def _fail(self, error: CoveyError) -> None:
        if not self.is_closed:  # otherwise what it waited for was ended on purpose
            self.tell(("failed", error))
