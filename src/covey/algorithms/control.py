"""Controllers: coefficients that adapt to measured metrics. Their value is kept in the training state."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from covey.types import StepReport


@runtime_checkable
class Controller(Protocol):
    """A coefficient with memory: `init()` gives its first value, `update` the next one from the report of a step.

    It may have `applied(value) -> float`, the coefficient used in the loss, where it differs from the value.
    """

    def init(self) -> float: ...

    def update(self, value: float, report: StepReport) -> float: ...


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
