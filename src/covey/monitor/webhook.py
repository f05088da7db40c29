"""Alerts posted to a URL as JSON. The run goes on if that URL fails or hangs."""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from covey.monitor.watch import lines_of
from covey.runs.manifest import to_json
from covey.types import Alert

logger = logging.getLogger(__name__)

_MOST_WAITING = 16


@dataclass(eq=False)
class Webhook:
    """Posts each alert from a thread of its own; `close` waits for the last ones, `deadline` seconds at most.

    The body is an object of `run`, `step`, `rule`, `severity`, `said`, `evidence`, `try_this` as in `alerts.jsonl`, and `text`,
    the same for people. `deadline` also bounds every single wait for the address. A failure is logged, the first in a row as
    a warning, without the address, which may be a secret. At most sixteen posts wait at a time; more are left out.
    """

    address: str = field(repr=False)
    run: str
    deadline: float = 10.0
    failures: int = 0
    """Failures in a row."""
    threads: list[threading.Thread] = field(default_factory=list)

    def __call__(self, alert: Alert) -> None:
        """Begin to post. Returns at once and never raises."""
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        if len(self.threads) >= _MOST_WAITING:
            self._failed(f"{len(self.threads)} posts are still waiting for an answer")
            return
        body = json.dumps(body_of(alert, self.run)).encode()
        thread = threading.Thread(target=self._post, args=(body,), name="covey-webhook", daemon=True)
        self.threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Wait for pending requests."""
        end = time.monotonic() + self.deadline
        for thread in self.threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "covey"}
        try:
            request = urllib.request.Request(self.address, data=body, headers=headers, method="POST")
            with urllib.request.urlopen(request, timeout=self.deadline):
                self.failures = 0
        except (OSError, HTTPException, ValueError) as error:  # refused, timed out, not found, not HTTP at all
            self._failed(f"{type(error).__name__} {getattr(error, 'code', '')}".strip())

    def _failed(self, why: str) -> None:
        self.failures += 1
        level = logging.WARNING if self.failures == 1 else logging.DEBUG
        logger.log(level, "alert_webhook did not take an alert (%s); it is in alerts.jsonl all the same.", why)


def body_of(alert: Alert, run: str) -> dict[str, Any]:
    """Body of the POST request as a JSON object; numbers that are not finite become text."""
    return {
        "run": run,
        "step": alert.step,
        "rule": alert.rule,
        "severity": alert.severity,
        "said": alert.said,
        "evidence": to_json(alert.evidence),
        "try_this": list(alert.try_this),
        "text": "\n".join((f"{run}: ", *lines_of(alert))),
    }
