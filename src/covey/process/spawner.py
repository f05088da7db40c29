"""Start of child processes that end with this one: `spawner().run(start)`, and pools of them.

Linux ends such a child (PR_SET_PDEATHSIG) with the *thread* that started it, so they are all started by a thread that lasts.
"""

import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

_Started = TypeVar("_Started")


class Spawner:
    """Starts processes on a thread that lasts: the kernel ends a worker with the *thread* that started it."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="covey-spawner", daemon=True).start()

    def run(self, start: Callable[[], _Started]) -> _Started:
        """Result of `start()`, called on that thread."""
        future: Future[_Started] = Future()
        self._tasks.put((start, future))
        return future.result()

    def _serve(self) -> None:
        while True:
            start, future = self._tasks.get()
            try:
                future.set_result(start())
            except Exception as error:  # noqa: BLE001 - raised where `run` waits
                future.set_exception(error)


@cache
def spawner() -> Spawner:
    """The spawner of this process."""
    return Spawner()


class Worker(Protocol):
    """A process that does one piece of work after the other."""

    @property
    def is_alive(self) -> bool: ...

    def begin(self) -> None:
        """Wait until it is ready. Raises where it cannot be."""

    def kill(self) -> None:
        """End it and everything it started."""


_Worker = TypeVar("_Worker", bound=Worker)


class WorkerProcesses(Generic[_Worker]):
    """At most `size` workers at a time, which `start` makes: started when first needed, killed by `close` and with this object."""

    def __init__(self, start: Callable[[], _Worker], size: int) -> None:
        self._start, self._room, self._lock = start, threading.BoundedSemaphore(size), threading.Lock()
        self._idle: list[_Worker] = []
        self.workers: set[_Worker] = set()
        """Those that are alive, as far as is known."""
        self._finalizer = weakref.finalize(self, _kill_all, self.workers)

    @contextmanager
    def worker(self) -> Iterator[_Worker]:
        """A worker of this thread's own. It is killed where the block raises."""
        with self._room:
            taken = self._take()
            with self._dropped_by_errors(taken):
                yield taken
            with self._lock:
                self._idle += [taken] if taken in self.workers else []

    def drop(self, worker: _Worker) -> None:
        """Kill a worker, which no later work gets."""
        with self._lock:
            is_left = worker in self.workers  # once it was waited for, its number may be another process's
            self.workers.discard(worker)
        if is_left:
            worker.kill()

    def close(self) -> None:
        """Kill every worker."""
        with self._lock:
            self._idle.clear()
            _kill_all(self.workers)

    def _take(self) -> _Worker:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    return worker
                self.workers.discard(worker)
        worker = spawner().run(self._start)
        with self._lock:
            self.workers.add(worker)
        with self._dropped_by_errors(worker):
            worker.begin()
        return worker

    @contextmanager
    def _dropped_by_errors(self, worker: _Worker) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.drop(worker)
            raise


def _kill_all(workers: set[Any]) -> None:
    while workers:
        workers.pop().kill()


def start_module(
    module: str, words: Sequence[object], descriptors: Sequence[int], path: Sequence[str] = (), **environment: str
) -> subprocess.Popen[bytes]:
    """`python -m module words...`, which inherits these file descriptors, and imports from covey's own folder and those of `path`.

    It has a session of its own: Ctrl-C is this process's to handle, and what it starts can be killed with it.
    """
    search = [str(Path(__file__).parents[2]), *path, os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, words)],
        stdin=subprocess.DEVNULL,
        pass_fds=tuple(descriptors),
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, search))},
        start_new_session=True,
    )
