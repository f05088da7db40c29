"""Numbers gone bad: what becomes of an update whose loss, gradient or KL is not finite, or far from what it has been.

The actions, in order: say so, clip, leave the update out, go back to the last good checkpoint, stop. `check` decides before
the weights are touched, from numbers that every process has; `next_action` decides after the step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from covey.errors import NumericsError
from covey.types import Event, Metric

Move = Literal["go_on", "roll_back"]
_WINDOW = 100
_ENOUGH = 20
_SMALLEST_KL = 0.1
"""Nats a token below which no KL is a jump: it starts at 0, so early on any value is far from the others."""
_SMALLEST_DEVIATION = 0.25
"""Least spread of a logarithm: twenty steps that happen to be equal must not make the next one a spike."""
_LEFT_OUT = frozenset({"non_finite_step", "spike_skipped"})


@dataclass(frozen=True, kw_only=True)
class GuardPolicy:
    """Limits of the guard: what a bad number or a spike leads to, and how often."""

    on_bad_numbers: Literal["skip", "roll_back", "stop"] = "skip"
    """Action on NaN and infinities: their update is always left out; then go on, go back, or stop."""
    on_spike: Literal["log", "clip", "skip", "roll_back", "stop"] = "log"
    """Action on a gradient norm or KL far above its recent values."""
    bad_steps_limit: int = 3
    """Updates left out in a row before the next action."""
    roll_backs_limit: int = 2
    """Times that a run goes back before it stops."""
    roll_back_learning_rate: float = 0.5
    """Factor on the learning rate each time."""
    spike_threshold: float = 8.0
    """Robust standard deviations of the logarithm above the median of the last 100 healthy steps."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Decision about one update."""

    is_left_out: bool = False
    max_norm: float = math.inf
    """Clip the gradient to this norm."""
    events: tuple[Event, ...] = ()


@dataclass(eq=False)
class UpdateGuard:
    """Remembers what healthy steps looked like. Every process holds the same, for metrics are merged before they are judged."""

    policy: GuardPolicy = field(default_factory=GuardPolicy)
    seen: dict[str, deque[float]] = field(default_factory=dict)
    """Logarithms of the last healthy values, by metric."""
    overflows: int = 0
    """Updates left out in a row because float16 overflowed, which a smaller loss scale cures."""

    def check(self, metrics: Mapping[str, Metric], step: int, *, loss_scale: float | None = None) -> Verdict:
        """Decision about the update that `metrics` (loss, grad_norm, kl ...) describe. Remembers them if they are healthy.

        `loss_scale`: with float16, what the loss was multiplied by: an overflow is then no fault of the numbers until the
        scale is down to 1.
        """
        values = {
            name: metrics[name].value for name in ("loss", "grad_norm", "value_grad_norm", "kl") if name in metrics
        }
        bad = [f"{name} {value}" for name, value in values.items() if name != "kl" and not math.isfinite(value)]
        if bad:
            return self._left_out(step, bad, math.isfinite(values.get("loss", math.nan)), loss_scale)
        self.overflows = 0
        spikes = [name for name in ("grad_norm", "kl") if self._is_spike(name, values.get(name, math.nan))]
        if not spikes:
            for name in ("grad_norm", "kl"):
                self._remember(name, values.get(name, math.nan))
            return Verdict()
        return self._on_spike(step, spikes, values)

    def next_action(self, step: int, bad_steps: int, roll_backs: int, events: tuple[Event, ...]) -> Move:
        """After a step, with so many left out in a row: go on, or go back. Raises NumericsError where the run must stop."""
        kinds = {event.kind for event in events}
        if not kinds & (_LEFT_OUT | {"spike"}):
            return "go_on"
        is_bad = "non_finite_step" in kinds
        action = self.policy.on_bad_numbers if is_bad else self.policy.on_spike
        said = next(event.said for event in events if event.kind in _LEFT_OUT | {"spike"})
        if action == "stop":
            raise NumericsError(f"{said} {'on_bad_numbers' if is_bad else 'on_spike'}='stop' ends the run here.")
        if bad_steps < self.policy.bad_steps_limit:
            return "go_on"
        if action == "roll_back" and roll_backs < self.policy.roll_backs_limit:
            return "roll_back"
        if action == "skip" and not is_bad:
            self.seen.clear()  # the level has moved for good; a run that is merely different is not ended
            return "go_on"
        raise NumericsError(
            f"{bad_steps} updates in a row were left out at step {step}"
            + (f", after {roll_backs} returns to a checkpoint" if roll_backs else "")
            + f"; the last: {said} Lower learning_rate, look at bad_steps/ in the run folder, or start from an earlier checkpoint."
        )

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {name: list(values) for name, values in self.seen.items()}, "overflows": self.overflows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = {name: deque(values, maxlen=_WINDOW) for name, values in state["seen"].items()}
        self.overflows = state["overflows"]

    def _left_out(self, step: int, bad: list[str], has_loss: bool, loss_scale: float | None) -> Verdict:
        if loss_scale is not None and loss_scale > 1.0 and has_loss:
            self.overflows += 1
            said = f"step {step}: float16 overflowed at a loss scale of {loss_scale:g}, which is halved; the update was left out."
            return Verdict(is_left_out=True, events=(Event(kind="float16_overflow", said=said),))
        said = f"step {step}: {' and '.join(bad)}; the update was left out."
        return Verdict(is_left_out=True, events=(Event(kind="non_finite_step", said=said),))

    def _on_spike(self, step: int, spikes: list[str], values: Mapping[str, float]) -> Verdict:
        usual = {name: math.exp(median(self.seen[name])) for name in spikes}
        told = " and ".join(f"{name} {values[name]:.3g} where {usual[name]:.3g} is usual" for name in spikes)
        details = {"spikes": {name: [values[name], usual[name]] for name in spikes}}
        action = self.policy.on_spike
        if action in ("skip", "roll_back", "stop"):
            event = Event(kind="spike_skipped", said=f"step {step}: {told}; the update was left out.", details=details)
            return Verdict(is_left_out=True, events=(event,))
        done, limit = "", math.inf
        if action == "clip" and "grad_norm" in spikes:
            limit = usual["grad_norm"]
            done = f"; the gradient was clipped to {limit:.3g}"
        return Verdict(
            max_norm=limit, events=(Event(kind="spike", said=f"step {step}: {told}{done}.", details=details),)
        )

    def _is_spike(self, name: str, value: float) -> bool:
        known = self.seen.get(name, ())
        if len(known) < _ENOUGH or not value > 0 or (name == "kl" and value < _SMALLEST_KL):
            return False
        middle = median(known)
        deviation = max(1.4826 * median(abs(x - middle) for x in known), _SMALLEST_DEVIATION)
        return math.log(value) - middle > self.policy.spike_threshold * deviation

    def _remember(self, name: str, value: float) -> None:
        if value > 0 and math.isfinite(value):  # a step without signal has norm 0, which says nothing about the others
            self.seen.setdefault(name, deque(maxlen=_WINDOW)).append(math.log(value))


def is_left_out(events: tuple[Event, ...]) -> bool:
    """True if the update of a step was left out for its numbers."""
    return any(event.kind in _LEFT_OUT for event in events)
