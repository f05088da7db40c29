"""Update guard: actions on an update whose loss, gradient norm or KL is not finite or a spike.

The actions, in order: log, clip, skip the update, roll back to the last good checkpoint, stop. `check` decides before
the weights change, from metrics merged over processes; `next_action` decides after the step.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from covey.errors import NumericsError
from covey.types import Event, Metric
from covey.types.reports import SKIPS

Move = Literal["go_on", "roll_back"]
_WINDOW = 100
_ENOUGH = 20
_SMALLEST_KL = 0.1
"""KL in nats per token below which it is never a spike: it starts at 0, so early values differ by large factors."""
_SMALLEST_DEVIATION = 0.25
"""Lower bound of the standard deviation of log values: after equal values the next must not count as a spike."""


@dataclass(frozen=True, kw_only=True)
class GuardPolicy:
    """Options of the guard: actions on non-finite numbers and spikes, and their limits."""

    on_bad_numbers: Literal["skip", "roll_back", "stop"] = "skip"
    """Action on NaN and infinities: the update is always skipped; then continue, roll back, or stop."""
    on_spike: Literal["log", "clip", "skip", "roll_back", "stop"] = "log"
    """Action on a gradient norm or KL far above its recent values."""
    bad_steps_limit: int = 3
    """Consecutive skipped updates before the next action."""
    roll_backs_limit: int = 2
    """Number of rollbacks before a run stops."""
    roll_back_learning_rate: float = 0.5
    """Factor on the learning rate at each rollback."""
    spike_threshold: float = 8.0
    """Threshold of a spike, in robust standard deviations of the log value above the median of the last 100 healthy steps."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Decision about one update."""

    is_left_out: bool = False
    max_norm: float = math.inf
    """Clip the gradient to this norm."""
    events: tuple[Event, ...] = ()


@dataclass(eq=False)
class UpdateGuard:
    """Keeps the metrics of recent healthy steps. Equal on every process, because metrics are merged first."""

    policy: GuardPolicy = field(default_factory=GuardPolicy)
    seen: dict[str, deque[float]] = field(default_factory=dict)
    """Logarithms of the last healthy values, by metric."""
    overflows: int = 0
    """Consecutive updates skipped for an overflow of float16, which a smaller loss scale cures."""

    def check(self, metrics: Mapping[str, Metric], step: int, *, loss_scale: float | None = None) -> Verdict:
        """Decision about an update by its `metrics` (loss, grad_norm, kl ...), which are kept if healthy.

        `loss_scale`: the loss scale of float16; an overflow counts as a bad number only once the scale is down
        to 1.
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
        """Action after a step with `bad_steps` consecutive skipped updates: continue or roll back. Raises NumericsError to stop."""
        kinds = {event.kind for event in events}
        if not kinds & (SKIPS | {"spike"}):
            return "go_on"
        is_bad = "non_finite_step" in kinds
        action = self.policy.on_bad_numbers if is_bad else self.policy.on_spike
        sentence = next(event.said for event in events if event.kind in SKIPS | {"spike"})
        if action == "stop":
            raise NumericsError(f"{sentence} {'on_bad_numbers' if is_bad else 'on_spike'}='stop' ends the run here.")
        if bad_steps < self.policy.bad_steps_limit:
            return "go_on"
        if action == "roll_back" and roll_backs < self.policy.roll_backs_limit:
            return "roll_back"
        if action == "skip" and not is_bad:
            self.seen.clear()  # the level has shifted for good, which is no reason to stop
            return "go_on"
        raise NumericsError(
            f"{bad_steps} updates in a row were left out at step {step}"
            + (f", after {roll_backs} returns to a checkpoint" if roll_backs else "")
            + f"; the last: {sentence} Lower learning_rate, look at bad_steps/ in the run folder, or start from an earlier checkpoint."
        )

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {name: list(values) for name, values in self.seen.items()}, "overflows": self.overflows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = {name: deque(values, maxlen=_WINDOW) for name, values in state["seen"].items()}
        self.overflows = state["overflows"]

    def _left_out(self, step: int, bad: list[str], has_loss: bool, loss_scale: float | None) -> Verdict:
        if loss_scale is not None and loss_scale > 1.0 and has_loss:
            self.overflows += 1
            sentence = f"step {step}: float16 overflowed at a loss scale of {loss_scale:g}, which is halved; the update was left out."
            return Verdict(is_left_out=True, events=(Event(kind="float16_overflow", said=sentence),))
        sentence = f"step {step}: {' and '.join(bad)}; the update was left out."
        return Verdict(is_left_out=True, events=(Event(kind="non_finite_step", said=sentence),))

    def _on_spike(self, step: int, spikes: list[str], values: Mapping[str, float]) -> Verdict:
        usual = {name: math.exp(median(self.seen[name])) for name in spikes}
        text = " and ".join(f"{name} {values[name]:.3g} where {usual[name]:.3g} is usual" for name in spikes)
        details = {"spikes": {name: [values[name], usual[name]] for name in spikes}}
        action = self.policy.on_spike
        if action in ("skip", "roll_back", "stop"):
            event = Event(kind="spike_skipped", said=f"step {step}: {text}; the update was left out.", details=details)
            return Verdict(is_left_out=True, events=(event,))
        done, limit = "", math.inf
        if action == "clip" and "grad_norm" in spikes:
            limit = usual["grad_norm"]
            done = f"; the gradient was clipped to {limit:.3g}"
        return Verdict(
            max_norm=limit, events=(Event(kind="spike", said=f"step {step}: {text}{done}.", details=details),)
        )

    def _is_spike(self, name: str, value: float) -> bool:
        history = self.seen.get(name, ())
        if len(history) < _ENOUGH or not value > 0 or (name == "kl" and value < _SMALLEST_KL):
            return False
        middle = median(history)
        deviation = max(1.4826 * median(abs(x - middle) for x in history), _SMALLEST_DEVIATION)
        return math.log(value) - middle > self.policy.spike_threshold * deviation

    def _remember(self, name: str, value: float) -> None:
        if value > 0 and math.isfinite(value):  # a step without gradient has norm 0 and is no reference for others
            self.seen.setdefault(name, deque(maxlen=_WINDOW)).append(math.log(value))
