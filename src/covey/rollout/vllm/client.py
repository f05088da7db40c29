"""HTTP client of a vLLM server: requests with a total deadline, and the endpoints that a server has.

A request that changes the server is sent once. Its effect is read from the server's state afterwards, never assumed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode, urlsplit

from covey.errors import ConfigError, ServerError
from covey.process.addresses import attempts_within
from covey.rollout.vllm.worker.covey_media import KEY

_MOST_BYTES = 2**31
"""Size limit of an answer in bytes; completions of thousands of tokens take some megabytes."""
_PROXY_CODES = (HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT)
_OF_A_PROXY = ", which a proxy before the server says (give the server's own address, or raise the proxy's time limit)"


class NoAnswerError(ServerError):
    """No complete answer before the deadline; the request may or may not have taken effect."""


class RefusedError(ServerError):
    """The server answered with an HTTP error. `status`: its code."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def is_lost(error: ServerError) -> bool:
    """True for no answer, and for HTTP errors of a server that ends or of a proxy before one that has ended."""
    return not isinstance(error, RefusedError) or error.status >= HTTPStatus.INTERNAL_SERVER_ERROR


@dataclass(frozen=True)
class Deadlines:
    """Deadline of each phase in seconds. The default values are generous for a server on the same network."""

    connect: float = 10.0
    read: float = 30.0
    """Seconds for reading state: version, paused or not, models."""
    init: float = 60.0
    pause: float = 30.0
    start: float = 30.0
    update: float = 30.0
    """Seconds of an update on top of its transfer at `bytes_per_second`."""
    bytes_per_second: float = 50e6
    finish: float = 30.0
    resume: float = 30.0
    probe: float = 60.0
    generation: float = 3600.0
    """Seconds for the completions of one prompt."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(f"vllm_deadlines: {name}={value!r}; give seconds (or bytes a second) above 0.")

    @staticmethod
    def of(overrides: Mapping[str, Any] | None) -> Deadlines:
        """The default values, overridden by `overrides`. Raises ConfigError for an unknown name."""
        names = set(Deadlines.__dataclass_fields__)
        for name in overrides or {}:
            if name not in names:
                raise ConfigError(f"vllm_deadlines has {name!r}; it knows {', '.join(sorted(names))}.")
        return Deadlines(**dict(overrides or {}))

    def update_of(self, num_bytes: int) -> float:
        """Deadline in seconds of an update of `num_bytes`."""
        return self.update + num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Address:
    """Address of a server: scheme, host, port, and a path prefix as a proxy may add."""

    scheme: str
    host: str
    port: int
    prefix: str = ""

    @staticmethod
    def of(base_url: str | None, host: str = "127.0.0.1", port: int = 8000) -> Address:
        """The address from TRL's options; 0.0.0.0 and :: mean this machine. Raises ConfigError for an invalid address."""
        url = base_url or f"http://{_bracketed(host)}:{port}"
        try:
            parts = urlsplit(url)
            number = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise ConfigError(f"vllm_server_base_url={url!r} is no address: {error}.") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"vllm_server_base_url={url!r} is no address; give one such as http://127.0.0.1:8000.")
        name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(parts.hostname, parts.hostname)
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return Address(parts.scheme, name, number, prefix)

    def __str__(self) -> str:
        return f"{self.scheme}://{_bracketed(self.host)}:{self.port}{self.prefix}"

    @property
    def is_local(self) -> bool:
        return self.host in ("localhost", "127.0.0.1", "::1")


def _bracketed(host: str) -> str:
    """A host as URLs write it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


@dataclass(eq=False)
class Client:
    """Requests to one server. Thread-safe; every request has a connection of its own.

    Raises ConfigError for an API key that no header can carry, whose own error would show it.
    """

    address: Address
    deadlines: Deadlines = field(default_factory=Deadlines)
    paths: frozenset[str] = frozenset()
    """Endpoints of the server, as its `/openapi.json` lists them; empty until `probe`."""
    key: str | None = field(default_factory=lambda: os.environ.get(KEY), repr=False)
    """API key, sent with every request."""
    key_from: str = f"the environment variable {KEY}"
    _open: set[http.client.HTTPConnection] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.key and not (self.key.isascii() and self.key.isprintable()):
            raise ConfigError(
                f"the API key of {self.key_from} has a line break or a character beyond ASCII, which a request cannot carry; set it anew."
            )

    def probe(self) -> frozenset[str]:
        """Read and store the server's list of endpoints. Raises ServerError if it has none."""
        try:
            description = self.get("/openapi.json")
        except RefusedError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            raise ServerError(
                f"{self.address} lists no endpoints ({error}) Is a vLLM server listening there? covey serve-vllm MODEL starts one."
            ) from error
        if not isinstance(description, Mapping) or not isinstance(description.get("paths"), Mapping):
            raise ServerError(f"{self.address}/openapi.json lists no endpoints; is a vLLM server listening there?")
        self.paths = frozenset(description["paths"])
        return self.paths

    def has(self, *paths: str) -> bool:
        return all(path in self.paths for path in paths)

    def get(self, path: str, query: Mapping[str, Any] | None = None, seconds: float | None = None) -> Any:
        """JSON body of a GET."""
        return self.call("GET", path, query=query, seconds=seconds or self.deadlines.read)

    def post(
        self,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        seconds: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """JSON body of a POST, which is sent once; None for an empty answer."""
        return self.call("POST", path, body, query=query, seconds=seconds or self.deadlines.read, headers=headers)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """One request within `seconds`, connecting and reading together. `body`: bytes as they are, anything else as JSON.

        Raises RefusedError for an HTTP error, NoAnswerError for silence, a broken connection or half an answer.
        """
        what = f"{method} {self.address}{path}"
        until = time.monotonic() + seconds
        sent = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        header_fields = {"Content-Type": kind, "Connection": "close", **(headers or {})}
        header_fields |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        where = f"{self.address.prefix}{path}" + (f"?{urlencode(query)}" if query else "")
        try:
            with self._connected(until) as connection:
                connection.request(method, where, sent, header_fields)
                with connection.getresponse() as response:  # else its socket would stay open
                    content = _read(connection, response, until)
        except TimeoutError as error:
            raise NoAnswerError(f"{what} did not answer within {seconds:g} seconds.") from error
        except (http.client.HTTPException, OSError, AttributeError) as error:  # a closed connection has no socket
            raise NoAnswerError(f"{what} broke off: {type(error).__name__} {error}".rstrip() + ".") from error
        if response.status == HTTPStatus.UNAUTHORIZED:
            wrong = "another API key than the one in" if self.key else "an API key: put it into"
            raise RefusedError(
                f"{what} answers HTTP 401, because the server wants {wrong} {self.key_from}.", response.status
            )
        if response.status >= 400:
            proxy = _OF_A_PROXY if response.status in _PROXY_CODES else ""
            raise RefusedError(f"{what} answers HTTP {response.status}{proxy}: {_message(content)}", response.status)
        if not content:
            return None
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            if "json" not in (response.headers.get("Content-Type") or ""):
                return content.decode(errors="replace")
            raise NoAnswerError(f"{what} answered no JSON: {_message(content)}") from error

    @contextmanager
    def _connected(self, until: float) -> Iterator[http.client.HTTPConnection]:
        kind = http.client.HTTPSConnection if self.address.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.address.host, self.address.port, timeout=self.deadlines.connect)
        with self._lock:
            self._open.add(connection)
        try:
            connection.timeout = max(0.01, min(self.deadlines.connect, until - time.monotonic()))
            connection.connect()
            connection.sock.settimeout(max(0.01, until - time.monotonic()))
            yield connection
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def hang_up(self) -> None:
        """Close the connections of all running requests; vLLM then aborts their completions."""
        with self._lock:
            waiting = list(self._open)
        for connection in waiting:
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def wait_until_up(self, seconds: float, check_stop: Callable[[], None] = lambda: None) -> None:
        """Wait until `/health` answers, and say so. Raises ServerError when it does not within `seconds`."""
        for left in attempts_within(seconds, "vllm_server_timeout", "vLLM server", self.address, check_stop):
            try:
                self.call("GET", "/health", seconds=max(0.05, min(self.deadlines.connect, left)))
                return
            except (NoAnswerError, RefusedError) as error:
                problem = error
            if isinstance(problem, RefusedError) and problem.status == HTTPStatus.UNAUTHORIZED:
                raise problem
            if isinstance(problem, RefusedError) and problem.status == HTTPStatus.NOT_FOUND:
                raise ServerError(
                    f"{self.address} answers, but has no /health, so that no vLLM server listens there; give the address of one "
                    "(vllm_server_base_url, or host and port), or start one: covey serve-vllm MODEL."
                ) from problem
        raise ServerError(
            f"No vLLM server answers at {self.address} within {seconds:g} seconds ({problem}) Start one "
            "(covey serve-vllm MODEL), or give its vllm_server_base_url and a longer vllm_server_timeout."
        ) from problem


def _read(connection: http.client.HTTPConnection, response: http.client.HTTPResponse, until: float) -> bytes:
    """The whole body. Raises TimeoutError past `until`, HTTPException where it is cut off."""
    parts: list[bytes] = []
    size = 0
    while True:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if connection.sock is not None:  # None: the whole answer is in memory already
            connection.sock.settimeout(left)
        piece = response.read1(2**16)
        if not piece:
            break
        parts.append(piece)
        size += len(piece)
        if size > _MOST_BYTES:
            raise http.client.HTTPException(f"the answer is longer than {_MOST_BYTES} bytes")
    announced = response.headers.get("Content-Length")
    if announced is not None and announced.isdigit() and size < int(announced):
        raise http.client.IncompleteRead(b"", int(announced) - size)
    return b"".join(parts)


def _message(content: bytes) -> str:
    """The message of an error's body, on one line, shortened."""
    text = content[:4000].decode(errors="replace")
    with contextlib.suppress(ValueError, RecursionError):
        body = json.loads(text)
        if isinstance(body, Mapping):
            inner = body.get("error", body.get("detail", body))
            text = str(inner.get("message", inner) if isinstance(inner, Mapping) else inner)
    return " ".join(text.split())[:300] or "(no message)"
