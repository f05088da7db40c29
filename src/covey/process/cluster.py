"""The Ray cluster that a run is connected to."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from covey.errors import ConfigError

NICENESS = "RAY_worker_niceness"
"""Ray's variable for the priority of workers."""


def connected(wanted_by: str, instead: str) -> Any:
    """Ray, connected to the cluster of RAY_ADDRESS or to a new one on this machine. Raises ConfigError without Ray."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"{wanted_by} needs Ray: pip install 'covey[ray]', or {instead}.") from error
    if not ray.is_initialized():
        with _signals_kept(), _plain_priority():
            ray.init(log_to_driver=False, include_dashboard=False)
    return ray


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Context that keeps this process's signal handlers: Ray replaces that of SIGTERM when it starts."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _plain_priority() -> Iterator[None]:
    """Context in which a new cluster's workers get the priority of this process. Ray's default is nice 15, so that beside a busy
    learner, or anything else on the machine, an actor gets next to no processor time. A value of the user's is kept.
    """
    if NICENESS in os.environ:
        yield
        return
    os.environ[NICENESS] = "0"
    try:
        yield
    finally:
        del os.environ[NICENESS]
