"""The monitor of a run, as its options say, and the webhook that alerts go to."""

import json
import logging
import math
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from covey.monitor.detectors import standard
from covey.monitor.history import History
from covey.monitor.monitor import Monitor
from covey.monitor.policy_drift import Anchor
from covey.monitor.progress import Progress
from covey.monitor.slices import Slices
from covey.monitor.updates import UpdateMeter
from covey.monitor.watch import SEVERITIES, Watch, lines_of
from covey.names import load, rule_of
from covey.process.addresses import opener_of
from covey.raised import place_of
from covey.runs.manifest import to_json
from covey.types import Alert

logger = logging.getLogger(__name__)


def build_monitor(
    args: Any,
    reward_names: Sequence[str],
    reward_weights: Sequence[Any],
    learner: Any,
    outlets: Sequence[Callable[[Alert], object]],
    meter: UpdateMeter | None,
) -> Monitor:
    """Everything watched of a `Learner`, whose updates `meter` measures. `outlets`: further receivers of alerts in the main process, in addition to the
    options' webhook; none on others."""
    audits = audit_metrics(args, reward_names, reward_weights)
    named = [load(rule, "alert detector") if isinstance(rule, str) else rule for rule in args.alert_detectors or ()]
    has_hook = args.alert_webhook and outlets
    hooks = [Webhook(args.alert_webhook, run=str(args.run_name or args.output_dir))] if has_hook else []
    return Monitor(
        reward_names=tuple(reward_names),
        watch=Watch([*standard(audits, paid_weights(reward_names, reward_weights)), *map(_Guarded, named)]),
        meter=meter,
        anchor=Anchor(learner.annotate),
        slices=Slices(args.metrics_by or ()),
        actions=dict(args.alert_actions or {}),
        outlets=[*outlets, *hooks],
        closing=[hook.close for hook in hooks],
    )


def audit_metrics(args: Any, reward_names: Sequence[str], weights: Sequence[Any]) -> tuple[str, ...]:
    """Metrics that are not trained on: the means of rewards of weight 0, the reward of evaluations, and those that are named."""
    unpaid = [name for name, weight in zip(reward_names, weights, strict=True) if weight == 0]
    return (*(f"rewards/{name}/mean" for name in unpaid), "eval_reward", *(args.audit_metrics or ()))


def paid_weights(reward_names: Sequence[str], weights: Sequence[Any]) -> dict[str, float]:
    """Weights above 0 that stay as they are, by the reward's name; a schedule or a function may mean to lower a reward."""
    paid: dict[str, float] = {}
    for name, value in zip(reward_names, weights, strict=True):
        try:
            weight = math.nan if callable(value) else float(value)
        except (TypeError, ValueError):  # a schedule
            continue
        if weight > 0:
            paid[name] = weight
    return paid


def alert_shower(display: Progress, is_shown: bool) -> Callable[[Alert], None]:
    """Outlet that shows alerts: as lines above the live progress line, or in the log where there is none."""

    def tell(alert: Alert) -> None:
        for line in lines_of(alert):
            if is_shown:
                display.show(line)
            else:
                logger.warning("%s", line)

    return tell


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
            with opener_of(self.address).open(request, timeout=self.deadline):
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


class _Guarded:
    """A user's detector whose exceptions, and results that are no alert, become the alert `detector_failed`; the run goes on."""

    def __init__(self, detector: Callable[[History], Any]) -> None:
        self.detector, self.name = detector, rule_of(detector)

    def __call__(self, seen: History) -> Alert | None:
        try:
            result = self.detector(seen)
        except Exception as error:  # noqa: BLE001 - the user's code; reported with its place
            return self._failed(seen, f"raised {type(error).__name__}: {error}", place_of(error))
        if result is not None and not isinstance(result, Alert):
            return self._failed(seen, f"returned a {type(result).__name__}, which is no alert", "")
        if result is not None and result.severity not in SEVERITIES:
            words = f"returned an alert of severity {result.severity!r}, which is none of {', '.join(SEVERITIES)}"
            return self._failed(seen, words, "")
        return result

    def _failed(self, seen: History, sentence: str, where: str) -> Alert:
        advice = ("return history.alert(...) or None; history[name].last(10) may be empty",)
        sentence, about = f"the detector {self.name} {sentence}", {"detector": self.name, "at": where}
        return seen.alert("detector_failed", "warning", sentence, advice, parts=[self.name], **about)
