"""The Ray cluster that a run is connected to."""

import importlib.util
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from covey.errors import ConfigError, first_line

NICENESS = "RAY_worker_niceness"
"""Ray's variable for the priority of workers."""

_CONNECT_SECONDS = 10.0


def connected(feature: str, instead: str) -> Any:
    """Ray, connected to the cluster of RAY_ADDRESS or to a new one on this machine. Raises ConfigError without Ray."""
    expect_cluster(feature, instead)
    import ray

    if not ray.is_initialized():
        with _signals_preserved(), _plain_priority():
            try:
                ray.init(log_to_driver=False, include_dashboard=False)
            except Exception as error:  # of many kinds: ports, files, memory, versions
                where = os.environ.get("RAY_ADDRESS") or "this machine"
                raise ConfigError(
                    f"Ray does not start on {where} ({type(error).__name__}: {first_line(error)}); ray status and the logs in /tmp/ray say more, or "
                    f"{instead}."
                ) from error
    return ray


def expect_cluster(feature: str, instead: str) -> None:
    """Raise ConfigError without Ray, or if this process is to connect to a RAY_ADDRESS where nothing listens: Ray tries for minutes."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"{feature} needs Ray: pip install 'covey[ray]', or {instead}.")
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    is_connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    if is_connected or not (host and port.isdigit()):  # no port: "auto", "local"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"No Ray cluster answers at RAY_ADDRESS={address} ({error}); start one there (ray start --head --port {port}), or unset "
            "RAY_ADDRESS for one on this machine."
        ) from error


@contextmanager
def _signals_preserved() -> Iterator[None]:
    """Context that keeps this process's signal handlers: Ray replaces that of SIGTERM when it starts."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _plain_priority() -> Iterator[None]:
    """Context in which a new cluster's workers get the priority of this process. Ray's default is nice 15, so that next to a busy
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
