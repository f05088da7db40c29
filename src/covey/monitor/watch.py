"""Running of detectors during training: their input, and when their alerts are raised or suppressed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from covey.monitor.detectors import Detector
from covey.monitor.history import History
from covey.types import Alert, StepReport

_CLEAR = 20
"""Steps for which a fault must be gone before it raises a new alert."""
SEVERITIES = ("info", "warning", "error")


@dataclass(eq=False)
class Watch:
    """Runs the detectors on each step and returns new alerts. A lasting fault alerts once, and again if it grows
    more severe, if it comes back after twenty steps without it, or if another part of the run has it too."""

    detectors: Sequence[Detector] = ()
    history: History = field(default_factory=History)
    sent: dict[str, list[int]] = field(default_factory=dict)
    """Last alert by rule, or by rule and part of the run: its step and its severity."""
    speed: Speed = field(default_factory=lambda: Speed())

    def __call__(self, report: StepReport) -> list[Alert]:
        """Alerts of this step that have not been sent yet."""
        values = {name: metric.value for name, metric in report.metrics.items()}
        values |= {f"seconds/{phase}": seconds for phase, seconds in report.seconds.items()}
        values |= self.speed(report)
        values["steps/non_finite"] = float(any(event.kind == "non_finite_step" for event in report.events))
        self.history.add(report.step, values)
        alerts = (detector(self.history) for detector in self.detectors)
        return [alert for alert in alerts if alert is not None and self._is_new(alert)]

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Store the metrics of an evaluation for the next step's detectors."""
        self.history.add(self.history.step, metrics)

    def state_dict(self) -> dict[str, Any]:
        """Everything but times, which say nothing of the machine that a run is resumed on."""
        return {"history": self.history.state_dict(), "told": {rule: list(seen) for rule, seen in self.sent.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history.load_state_dict(state["history"])
        self.sent = {rule: list(seen) for rule, seen in state["told"].items()}
        self.speed = Speed()

    def _is_new(self, alert: Alert) -> bool:
        faults = [f"{alert.rule} {part}" for part in alert.parts] or [alert.rule]
        are_new = [self._is_new_fault(fault, alert) for fault in faults]  # each of them is noted
        return any(are_new)

    def _is_new_fault(self, fault: str, alert: Alert) -> bool:
        before = self.sent.get(fault)
        severity = SEVERITIES.index(alert.severity)
        is_gone = before is None or alert.step - before[0] > _CLEAR
        is_new = is_gone or (before is not None and severity > before[1])
        worst = severity if before is None or is_gone else max(severity, before[1])
        self.sent[fault] = [alert.step, worst]
        return is_new


@dataclass(eq=False)
class Speed:
    """`tokens_per_second/step`, once a rollout: steps that reuse a rollout are fast, and would look like a change of pace."""

    tokens: float = 0.0
    seconds: float = 0.0

    def __call__(self, report: StepReport) -> dict[str, float]:
        """The speed from the rollout before to this one; nothing between two rollouts."""
        speeds = {}
        if "rollout" in report.seconds:
            if self.seconds > 0:
                speeds["tokens_per_second/step"] = self.tokens / self.seconds
            self.tokens = self.seconds = 0.0
        tokens = report["num_tokens"]
        self.tokens += tokens if math.isfinite(tokens) else 0.0
        self.seconds += report.seconds.get("step", 0.0)
        return speeds


def lines_of(alert: Alert) -> Iterator[str]:
    """Lines that show an alert: the problem, then each fix to try."""
    yield f"{alert.severity} at step {alert.step}, {alert.rule}: {alert.said}"
    for advice in alert.try_this:
        yield f"  try: {advice}"
