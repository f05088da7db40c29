"""Alerts reach a real server on loopback; a server that is bad in any way never hurts a run."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from covey.monitor.setup import Webhook
from covey.types import Alert
from faults.small_runs import lines, trainer
from kit import rest_nightly

ALERT = Alert(
    rule="dead_groups", severity="warning", said="Dead.", step=7, evidence={"tied": 1.0, "z": float("inf")}, try_this=("x",)
)  # fmt: skip


@contextmanager
def server(answer: int = 200, wait: float = 0.0, location: str = "") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Address of a server that keeps what is posted to it."""
    got: list[dict[str, Any]] = []
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            is_over.wait(wait)
            self.send_response(answer)
            if location:
                self.send_header("Location", location)
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Nothing on the test's screen."""

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:
                got.append({"gone": True})

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as one:
        thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{one.server_port}/hook/secret-part", got
        finally:
            is_over.set()
            one.shutdown()
            thread.join()


def test_an_alert_is_posted_as_json():
    with server() as (address, got):
        hook = Webhook(address, run="first")
        hook(ALERT)
        hook.close()
    (body,) = got
    assert body.pop("text") == "first: \nwarning at step 7, dead_groups: Dead.\n  try: x"
    assert body == {
        "run": "first", "step": 7, "rule": "dead_groups", "severity": "warning", "said": "Dead.",
        "evidence": {"tied": 1.0, "z": "inf"}, "try_this": ["x"],
    }  # fmt: skip
    assert hook.failures == 0


def test_a_server_that_says_no_is_one_warning_without_the_address(caplog):
    with server(answer=500) as (address, _), caplog.at_level(logging.WARNING):
        hook = Webhook(address, run="first")
        for _ in range(3):
            hook(ALERT)
            hook.close()
    assert hook.failures == 3
    assert [record.getMessage() for record in caplog.records] == [
        "alert_webhook did not take an alert (HTTPError 500); it is in alerts.jsonl all the same."
    ]
    assert "secret-part" not in caplog.text + repr(hook)


def test_a_post_that_is_redirected_is_refused_rather_than_followed_without_its_body(caplog):
    with server() as (address, got), server(answer=301, location=address) as (moved, _):
        hook = Webhook(moved, run="first")
        hook(ALERT)
        hook.close()
    assert got == []
    assert "alert_webhook did not take an alert (HTTPError 301)" in caplog.text


def test_an_address_where_nobody_listens_or_that_is_not_http_is_a_warning():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for address in (f"http://127.0.0.1:{port}/", "http://[bad/", f"https://127.0.0.1:{port}/"):
        hook = Webhook(address, run="first")
        hook(ALERT)
        hook.close()
        assert hook.failures == 1


def test_a_server_that_never_answers_costs_no_more_than_the_deadline():
    with server(wait=30.0) as (address, _):
        hook = Webhook(address, run="first", deadline=0.5)
        started = time.monotonic()
        for _ in range(40):
            hook(ALERT)
        assert time.monotonic() - started < 10, "posting does not wait"
        assert len(hook.threads) <= 16
        hook.close()
        assert time.monotonic() - started < 15
        assert hook.failures >= 24


@pytest.mark.parametrize("answer", rest_nightly([200, 503], [503]))
def test_a_real_run_posts_its_alerts_and_ends_well_whatever_the_server_says(tmp_path, answer):
    with server(answer) as (address, got):
        one = trainer(
            tmp_path / "run", reward_funcs=lambda completions, **kwargs: [0.0] * len(completions), max_steps=11,
            save_strategy="no", max_completion_length=4, alert_webhook=address, run_name="my run",
        )  # fmt: skip
        assert one.train().global_step == 11
    told = lines(tmp_path / "run", "alerts.jsonl")
    posted = sorted((body["step"], body["rule"]) for body in got)
    assert posted == sorted((alert["step"], alert["rule"]) for alert in told) != []
    assert {body["run"] for body in got} == {"my run"}
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["alert_webhook"] == "***"
