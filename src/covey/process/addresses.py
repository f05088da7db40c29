"""Addresses of servers: which of them this machine alone can reach, a socket that listens there, its URL, questions to one, and waiting for one that starts."""

import ipaddress
import logging
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from covey.errors import ConfigError

logger = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """True if only this machine can reach an address of this name: `localhost`, or a loopback address in full."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def names_loopback(host_header: str) -> bool:
    """True for a `Host` header, with a port or without, that names this machine as it alone can."""
    return is_loopback(host_header if host_header.endswith("]") else host_header.rsplit(":", 1)[0])


def opener_of(url: str) -> urllib.request.OpenerDirector:
    """Proxies from the environment, except to this machine; a POST's redirect is an HTTPError, since urllib drops its body there."""
    is_here = is_loopback(urlsplit(url).hostname or "")
    return urllib.request.build_opener(_Redirects(), *([urllib.request.ProxyHandler({})] if is_here else []))


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: urllib.request.Request, *where: Any) -> urllib.request.Request | None:
        return super().redirect_request(req, *where) if req.data is None else None


def listen(host: str, port: int) -> socket.socket:
    """A socket to serve on. Raises ConfigError for an address that is taken, and for no port."""
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536:
        raise ConfigError(f"port {port!r} is none; give a whole number from 0 (any free one) to 65535.")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        sentence = (
            f"{host} port {port} cannot be listened on ({error.strerror or error}); choose another port, or 0 for any."
        )
        raise ConfigError(sentence) from error
    return listener


def url_of(host: str, listener: socket.socket) -> str:
    """`http://NAME:PORT` of a listening server."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"


_WORD_SECONDS = 30.0
"""Seconds between two warnings of a wait."""


def attempts_within(
    seconds: float, limit: str, server: str, address: object, check_stop: Callable[[], None] = lambda: None
) -> Iterator[float]:
    """Attempts to reach a server that starts, half a second apart: the seconds left at each. The first is made whatever the limit.

    A warning names the server, its address, the `limit`'s option and how to end the wait after the first, and what is left every 30 seconds.
    `check_stop` is called before each.
    """
    until = time.monotonic() + seconds
    left = due = seconds
    while True:
        check_stop()
        yield left
        if time.monotonic() >= until:
            return
        if left <= due:
            how = "waiting up to %g seconds (%s)" if left == seconds else "%.0f seconds are left (%s)"
            logger.warning(f"No %s answers at %s yet; {how}. Ctrl+C ends the wait.", server, address, left, limit)
            due = left - _WORD_SECONDS
        time.sleep(max(0.0, min(0.5, until - time.monotonic())))
        left = until - time.monotonic()


def listens_everywhere(port: int) -> bool:
    """True if a process of this machine listens on all its interfaces; False where the system does not say."""
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:  # macOS: root only
        return False
    return any(
        connection.status == psutil.CONN_LISTEN
        and connection.laddr.port == port
        and connection.laddr.ip in ("0.0.0.0", "::")
        for connection in connections
    )
