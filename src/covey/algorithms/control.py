"""Controllers: coefficients that adapt to measured metrics. Their value is kept in the training state."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

from covey.declared import CountOrZero, Finite, StepValue, checked_dataclass
from covey.types import StepReport

P = TypeVar("P")


@runtime_checkable
class Controller(Protocol):
    """A coefficient with memory: `init()` gives its first value, `update` the next one from the report of a step.

    It may have `applied(value) -> float`, the coefficient used in the loss, where it differs from the value.
    """

    def init(self) -> float: ...

    def update(self, value: float, report: StepReport) -> float: ...


@checked_dataclass(frozen=True)
class WarmUp:
    """A coefficient by the number of steps `s` before: `target s / steps`, from there on `target (1 - (s - steps) / decay)`, at least 0.

    `decay=0`: `target` from there on. As ms-swift's `rlsd_lambda_warmup_steps` and `rlsd_lambda_decay_steps`.
    """

    target: Finite
    steps: CountOrZero = 0
    decay: CountOrZero = 0

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
    methods = (getattr(value, name, None) for name in ("init", "update"))  # the protocol itself is slow to ask
    return not isinstance(value, type) and all(map(callable, methods))


def applied(controller: Controller, value: float) -> float:
    """The coefficient that a controller's memory stands for."""
    reading = getattr(controller, "applied", None)
    return float(reading(value)) if callable(reading) else value


def current(coefficient: float | Controller) -> float:
    """The number itself, or where a controller starts."""
    return applied(coefficient, coefficient.init()) if isinstance(coefficient, Controller) else float(coefficient)


def _inside(part: Any) -> dict[str, Any]:
    """Values inside a part by name: the fields of a dataclass, the places of a tuple."""
    if type(part) is tuple:
        return {str(place): value for place, value in enumerate(part)}
    is_record = is_dataclass(part) and not isinstance(part, type)
    return {item.name: getattr(part, item.name) for item in fields(part)} if is_record else {}


def controllers_in(part: Any, path: str = "") -> dict[str, Controller]:
    """Adaptive coefficients of a part and of the parts within it, such as the shape of an objective, by path."""
    adaptive: dict[str, Controller] = {}
    for name, value in _inside(part).items():
        place = f"{path}{name}"
        adaptive |= {place: value} if is_controller(value) else controllers_in(value, f"{place}.")
    return adaptive


def settled(part: P, values: Mapping[str, float], path: str = "") -> P:
    """The part with each controller in it replaced by its coefficient, from its state in `values` (its start, where absent)."""
    inside, changes = _inside(part), dict[str, Any]()
    for name, value in inside.items():
        place = f"{path}{name}"
        if is_controller(value):
            new: Any = StepValue(applied(value, values.get(place, value.init())))
        else:
            new = settled(value, values, f"{place}.")
        changes |= {} if new is value else {name: new}
    if not changes:
        return part
    return tuple((inside | changes).values()) if isinstance(part, tuple) else replace(part, **changes)  # type: ignore
