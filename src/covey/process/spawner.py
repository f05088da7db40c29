"""Start of child processes that end with this one: `spawner().run(start)`.

Linux ends such a child (PR_SET_PDEATHSIG) with the *thread* that started it, so they are all started by a thread that lasts.
"""

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

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
