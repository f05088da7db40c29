"""A real learning endpoint of the shipped model, in this process or its own, and simulated clients of it."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from covey.demo import task

Judge = Callable[[str, dict[str, Any]], float]
"""The score that a client gives to an answer to a row."""


def call(url: str, page: str, body: Any = None, key: str | None = None) -> tuple[int, dict[str, Any]]:
    """Status and JSON answer of a page below the base URL."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(f"{url}/{page}", None if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def ask(url: str, row: dict[str, Any], **how: Any) -> dict[str, Any]:
    """The body of a chat answer, drawn at temperature 1 unless told otherwise."""
    status, said = call(
        url, "chat/completions", {"messages": row["prompt"], "temperature": 1.0, "max_tokens": 48, **how}
    )
    assert status == 200, said
    return said


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def is_right(text: str, row: dict[str, Any]) -> float:
    return task.reward([text], [row["answer"]])[0]


def scored(
    url: str, rows: list[dict[str, Any]], judge: Judge | None, seed: int = 0, **how: Any
) -> list[dict[str, Any]]:
    """Ask every row, sixteen at a time, and score every answer where there is a judge. Returns the answers.

    Row i is drawn with `1000 * seed + i`, so that an answer depends on the weights and not on who asked first.
    """

    def one(numbered: tuple[int, dict[str, Any]]) -> dict[str, Any]:
        i, row = numbered
        said = ask(url, row, **{"seed": 1000 * seed + i} | how)
        if judge is None:
            return said
        status, taken = call(url, "feedback", {"id": said["id"], "score": judge(text_of(said), row)})
        assert status == 200, taken
        return said

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(one, enumerate(rows)))


def candidates(url: str, count: int, seconds: float = 300.0) -> list[dict[str, Any]]:
    """The log of candidates once it has `count` entries."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        status = call(url, "learning")[1]
        assert status["problem"] is None, status["problem"]
        if len(status["candidates"]) >= count:
            return list(status["candidates"])
        time.sleep(0.1)
    raise AssertionError(f"no {count} candidates within {seconds:.0f} s: {status}")


class Load:
    """Clients that ask `pause` seconds after each answer, in a thread each, from `with` to its end; `answers` and `errors` are what they got."""

    def __init__(self, url: str, rows: list[dict[str, Any]], clients: int = 4, pause: float = 0.0) -> None:
        self.pause = pause
        self.answers: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(url, rows[i::clients])) for i in range(clients)]

    def _work(self, url: str, rows: list[dict[str, Any]]) -> None:
        while not self._done.is_set():
            for row in rows:
                if self._done.is_set():
                    return
                try:
                    self.answers.append(ask(url, row))
                    time.sleep(self.pause)
                except Exception as error:  # noqa: BLE001 - counted by the test
                    self.errors.append(repr(error))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()
