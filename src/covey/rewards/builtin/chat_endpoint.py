"""A chat model behind an OpenAI-compatible HTTP address: asked with retries, back-off, a deadline and a memory on disk."""

import contextlib
import hashlib
import http.client
import json
import os
import random
import re
import sqlite3
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from covey.declared import Count, CountOrZero, NotNegative, Positive, checked_dataclass
from covey.errors import ConfigError, RewardError, ServerError
from covey.process.addresses import attempts_within, opener_of
from covey.rewards.builtin.text import clean
from covey.rewards.calling.deadline import Lanes

Message = Mapping[str, str]
T = TypeVar("T")

MOST_BYTES = 4 * 2**20
REQUESTS_AT_ONCE = 16

_PASSING = frozenset({408, 409, 425, 429})
"""Refusals that may pass; so may every 5xx."""
_LONGEST_WAIT = 30.0
_PATIENCE_SECONDS = 10.0
"""Longest wait for one answer of a server that is looked for before the run starts."""
_STARTING = (502, 503, 504)
"""Answers of a server that is not ready, or of a proxy before one that does not listen yet."""


class ReplyError(ValueError):
    """The judge answered, but not in the form that was asked for."""


class _PassingError(ConnectionError):
    """Transient error, worth a retry; `wait` is the server's Retry-After in seconds."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


@dataclass(frozen=True)
class Reply:
    """The model's reply and its token counts."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_requests: int = 1
    """HTTP requests that it took; 0 for a remembered one."""
    finish: str = "stop"
    """The endpoint's `finish_reason`."""
    thoughts: str = ""
    """Thoughts of a reasoning model before `text`, where the endpoint returns them apart (`reasoning_content` or `reasoning`)."""


@checked_dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Address of a model server, with its time limits. The key is read from the environment when a request is sent."""

    url: str
    """Up to and with `/v1`, as `http://localhost:8000/v1`."""
    model: str
    key_env: str = "OPENAI_API_KEY"
    temperature: NotNegative = 0.0
    max_tokens: Count = 1024
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More fields of the request's body."""
    request_seconds: Positive = 60.0
    """The longest that one request may take, connecting and reading together."""
    retries: CountOrZero = 4
    backoff_seconds: NotNegative = 0.5
    """Pause before the first retry; doubled for each further one, at most 30, less a random part of up to a half."""
    called: str = "judge"
    """Name of the endpoint in messages."""
    most_bytes: Count = MOST_BYTES
    """Longest body of an answer that is read."""

    def __post_init__(self) -> None:
        _expect_address(self.url, self.called)
        if not self.model:
            raise ConfigError(f"{self.called}(model='') names no model; give the one that the endpoint serves.")

    def body(self, messages: Sequence[Message]) -> dict[str, Any]:
        """The request body as JSON."""
        shape = {"model": self.model, "temperature": self.temperature, "max_tokens": int(self.max_tokens)}
        return {**shape, **self.extra, "messages": [dict(message) for message in messages]}

    def ask(self, messages: Sequence[Message], until: float) -> Reply:
        """The model's reply, at the latest at `until` (time.monotonic). Raises as `post` does."""
        reply, attempts = self.post("chat/completions", self.body(messages), _reply_of, until)
        return replace(reply, num_requests=attempts)

    def post(self, path: str, body: Mapping[str, Any], read: Callable[[bytes], T], until: float) -> tuple[T, int]:
        """Result of `read` on the answer of `path`, and the number of requests that it took.

        Raises TimeoutError or ConnectionError when nothing came in time or in `retries` more attempts, RewardError for what
        no attempt can mend: a wrong key, model or address.
        """
        data = json.dumps(body).encode()
        for attempt in range(self.retries + 1):
            try:
                answer = self._once(path, data, min(until, time.monotonic() + self.request_seconds))
                return read(answer), attempt + 1
            except (_PassingError, TimeoutError) as error:
                wait = getattr(error, "wait", 0.0) or self._pause(attempt)
                if attempt == self.retries:
                    kind = TimeoutError if isinstance(error, TimeoutError) else ConnectionError
                    raise kind(f"the {self.called} at {self.url} failed {attempt + 1} times; last: {error}") from error
                if time.monotonic() + wait >= until:
                    raise TimeoutError(
                        f"no answer from the {self.called} at {self.url} in time; last: {error}"
                    ) from error
                time.sleep(wait)
        raise AssertionError("unreachable")

    def _pause(self, attempt: int) -> float:
        return min(_LONGEST_WAIT, self.backoff_seconds * 2.0**attempt) * random.uniform(0.5, 1.0)

    def _once(self, path: str, data: bytes, until: float) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        key = os.environ.get(self.key_env)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"{self.url.rstrip('/')}/{path}", data, headers, method="POST")
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("no time was left to ask")
        try:
            with opener_of(self.url).open(request, timeout=left) as response:
                return _read(response, until, self.most_bytes)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error) from error
        except TimeoutError:
            raise
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise TimeoutError("it could not be reached in time") from error
            raise _PassingError(f"it cannot be reached ({error.reason})") from error
        except (http.client.HTTPException, OSError) as error:
            raise _PassingError(f"the connection broke ({type(error).__name__}: {error})") from error

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        with contextlib.suppress(OSError, http.client.HTTPException):
            detail = " ".join(error.read(2000).decode(errors="replace").split())[:200]
            if error.code in _PASSING or error.code >= 500:
                return _PassingError(f"HTTP {error.code} {detail}".strip(), _retry_after(error.headers))
            key = f" The key is read from ${self.key_env}." if error.code in (401, 403) else ""
            return RewardError(
                f"The {self.called} at {self.url} refuses model {self.model!r}: HTTP {error.code} {detail}.{key}"
            )
        return _PassingError(f"HTTP {error.code}, and the connection broke")


def _expect_address(url: str, called: str) -> None:
    with contextlib.suppress(ValueError):  # a port that is no number, or a bracket without its other
        parts = urlsplit(str(url))
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return
    raise ConfigError(f"{called}(url={url!r}): give an address such as http://localhost:8000/v1.")


def expect_server(url: str, called: str, seconds: float) -> None:
    """Wait up to `seconds` for a server that starts: one that refuses the connection, or answers HTTP 502 to 504.

    It lists the server's models. Raises ServerError where it is not up in time, or at once where its name or its certificate is wrong, and
    ConfigError where its API is at another path. Any other answer, or a slow one, is left to the first question.
    """
    _expect_address(url, called)
    base, parts = url.rstrip("/"), urlsplit(url)
    for left in attempts_within(seconds, "server_timeout", called, url):
        status, problem = _status_of(f"{base}/models", max(1.0, min(_PATIENCE_SECONDS, left)))
        problem = f"HTTP {status}" if status in _STARTING else problem
        is_starting = status in _STARTING or isinstance(problem, ConnectionError)
        if not is_starting:
            break
    if problem is not None:
        waited = f" within server_timeout={seconds:g} seconds" if is_starting and seconds else ""
        raise ServerError(
            f"The {called} at {url} cannot be reached{waited} ({problem}): start its server, or mend the address."
        )
    for other in (f"{base}/v1", f"{parts.scheme}://{parts.netloc}/v1") if status == 404 else ():
        if _status_of(f"{other}/models", _PATIENCE_SECONDS)[0] == 200:
            raise ConfigError(f"The {called} at {url} has its API at another path: write {other}.")


def _status_of(url: str, seconds: float) -> tuple[int | None, object]:
    """HTTP status of an address, None where it gave none in time, and the reason why it cannot be reached."""
    try:
        with opener_of(url).open(url, timeout=seconds) as answer:
            return answer.status, None
    except urllib.error.HTTPError as error:
        error.close()
        return error.code, None
    except urllib.error.URLError as error:
        return None, error.reason
    except (http.client.HTTPException, OSError) as error:
        return None, error if isinstance(error, ConnectionError) else None


def _read(response: Any, until: float, most: int = MOST_BYTES) -> bytes:
    """The whole body, which may neither drip past `until` nor grow without end."""
    parts: list[bytes] = []
    size = 0
    while piece := response.read1(65536):
        parts.append(piece)
        size += len(piece)
        if size > most:
            raise _PassingError(f"its reply is longer than {most} bytes")
        if time.monotonic() > until:
            raise TimeoutError("its reply did not end in time")
    announced = response.headers.get("Content-Length")
    if announced is not None and re.fullmatch("[0-9]{1,18}", announced) and size < int(announced):
        raise _PassingError("its reply was cut off")
    return b"".join(parts)


def _reply_of(body: bytes) -> Reply:
    try:
        reply = json.loads(body)
        choice = reply["choices"][0]
        message, finish = choice["message"], str(choice.get("finish_reason") or "stop")
        thoughts = next((message[name] for name in ("reasoning_content", "reasoning") if message.get(name)), "")
        text = message["content"] if isinstance(message.get("content"), str) or not thoughts else ""
        usage = reply.get("usage") or {}
        num_prompt_tokens, written = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        shown = body[:80].decode(errors="replace")
        raise _PassingError(f"its reply is no chat completion ({shown!r})") from error
    if not isinstance(text, str) or not isinstance(thoughts, str):
        raise _PassingError("its reply holds no text")
    return Reply(text, num_prompt_tokens, written, finish=finish, thoughts=thoughts)


def _retry_after(headers: Any) -> float:
    value = str(headers.get("Retry-After") or "") if headers is not None else ""
    return min(_LONGEST_WAIT, float(value)) if re.fullmatch(r"[0-9]+(\.[0-9]*)?", value) else 0.0


class ReplyCache:
    """Replies by request, in memory or in an SQLite file that several processes may share."""

    def __init__(self, path: str | Path | None = None) -> None:
        self._lock = threading.Lock()
        where = ":memory:" if path is None else str(Path(path).expanduser())
        try:
            if path is not None:
                Path(where).parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(where, timeout=30.0, check_same_thread=False, isolation_level=None)
            weakref.finalize(self, self._file.close).atexit = False  # Python 3.13 warns of a file that only goes
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("CREATE TABLE IF NOT EXISTS replies (asked BLOB PRIMARY KEY, text TEXT NOT NULL)")
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(
                f"judge(cache={where!r}) cannot be used as a cache: {error}; give another path."
            ) from error

    def get(self, request: Mapping[str, Any]) -> str | None:
        with self._lock:
            row = self._file.execute("SELECT text FROM replies WHERE asked = ?", (_digest(request),)).fetchone()
        return None if row is None else str(row[0])

    def put(self, request: Mapping[str, Any], text: str) -> None:
        with self._lock:
            self._file.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (_digest(request), clean(text)))


def _digest(request: Mapping[str, Any]) -> bytes:
    return hashlib.blake2b(json.dumps(request, sort_keys=True).encode(), digest_size=16).digest()


def all_of(work: Sequence[Callable[[], T]], check_stop: Callable[[], None]) -> list[T]:
    """Results of all pieces of work, `REQUESTS_AT_ONCE` at a time. `check_stop` is called while they are awaited; its error, or one of theirs, ends it."""
    pool = ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="endpoint")
    futures = [pool.submit(call) for call in work]
    try:
        waiting: set[Future[T]] = set(futures)
        while waiting:
            done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            check_stop()
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def side_by_side(work: Sequence[Callable[[], Any]], gate: threading.Semaphore, most: int, until: float) -> list[Any]:
    """Results (or exceptions) of each piece of work, run at most `most` at a time and as `gate` permits.

    Work unfinished at `until` gives a TimeoutError; its thread is a daemon and ends with its own time limit.
    """

    def gated(call: Callable[[], Any]) -> Any:
        with gate:
            return call()

    lanes = Lanes("judge", most)
    futures = [lanes.run(partial(gated, call)) for call in work]
    wait(futures, max(0.0, until - time.monotonic()))
    for future in futures:
        future.cancel()
    lanes.close()
    late = TimeoutError("the judge was not done in time")
    is_done = lambda future: future.done() and not future.cancelled()
    return [future.exception() or future.result() if is_done(future) else late for future in futures]
