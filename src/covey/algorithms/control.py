"""Controllers: coefficients that adapt to measured metrics. Their value is kept in the training state."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from covey.errors import ConfigError
from covey.types import StepReport


@runtime_checkable
class Controller(Protocol):
    """A coefficient with memory: `init()` gives its first value, `update` the next one from the report of a step.

    It may have `applied(value) -> float`, the coefficient used in the loss, where it differs from the value.
    """

    def init(self) -> float: ...

    def update(self, value: float, report: StepReport) -> float: ...


@dataclass(frozen=True)
class WarmUp:
    """A coefficient by the number of steps `s` before: `target s / steps`, from there on `target (1 - (s - steps) / decay)`, at least 0.

    `decay=0`: `target` from there on. As ms-swift's `rlsd_lambda_warmup_steps` and `rlsd_lambda_decay_steps`.
    """

    target: float
    steps: int = 0
    decay: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "decay"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"WarmUp's {name}={value!r} is no whole number of 0 or more.")

    def init(self) -> float:
        return self._after(0)

    def update(self, value: float, report: StepReport) -> float:
        return self._after(report.step)

    def _after(self, step: int) -> float:
        if step < self.steps:
            return self.target * step / self.steps
        return self.target * max(0.0, 1.0 - (step - self.steps) / self.decay) if self.decay else self.target


def is_controller(value: Any) -> bool:
    """True if `value` has `init` and `update`."""
    return isinstance(value, Controller) and not isinstance(value, type)


def applied(controller: Controller, value: float) -> float:
    """The coefficient that a controller's memory stands for."""
    reading = getattr(controller, "applied", None)
    return float(reading(value)) if callable(reading) else value


def current(coefficient: float | Controller) -> float:
    """The number itself, or where a controller starts."""
    return applied(coefficient, coefficient.init()) if isinstance(coefficient, Controller) else float(coefficient)
