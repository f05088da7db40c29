"""The Ray cluster that a run is connected to."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from covey.errors import ConfigError


def connected(wanted_by: str, instead: str) -> Any:
    """Ray, connected to the cluster of RAY_ADDRESS or to a new one on this machine. Raises ConfigError without Ray."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"{wanted_by} needs Ray: pip install 'covey[ray]', or {instead}.") from error
    if not ray.is_initialized():
        with _signals_kept():
            ray.init(log_to_driver=False, include_dashboard=False)
    return ray


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Context that keeps this process's signal handlers: Ray replaces that of SIGTERM when it starts."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)
