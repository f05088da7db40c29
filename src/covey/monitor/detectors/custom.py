"""Detectors of the user's own: found by import path, and kept from ending a run that they only watch."""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from covey.monitor.history import History
from covey.names import load, rule_of
from covey.types import Alert


def custom_detectors(detectors: Sequence[Any]) -> tuple[Callable[[History], Alert | None], ...]:
    """Callables, and those that import paths such as "my_alerts.py:too_polite" lead to. ConfigError where one does not."""
    return tuple(
        _Guarded(load(detector, "alert detector") if isinstance(detector, str) else detector) for detector in detectors
    )


class _Guarded:
    """A user's detector whose exceptions, and results that are no alert, become the alert `detector_failed`; the run goes on."""

    def __init__(self, detector: Callable[[History], Any]) -> None:
        self.detector, self.name = detector, rule_of(detector)

    def __call__(self, seen: History) -> Alert | None:
        try:
            result = self.detector(seen)
        except Exception as error:  # noqa: BLE001 - the user's code; reported with its place
            where = traceback.extract_tb(error.__traceback__)[-1]
            return self._failed(seen, f"raised {type(error).__name__}: {error}", f"{where.filename}:{where.lineno}")
        if result is None or isinstance(result, Alert):
            return result
        return self._failed(seen, f"returned a {type(result).__name__}, which is no alert", "")

    def _failed(self, seen: History, sentence: str, where: str) -> Alert:
        advice = ("return history.alert(...) or None; history[name].last(10) may be empty",)
        return seen.alert(
            "detector_failed", "warning", f"the detector {self.name} {sentence}", advice, detector=self.name, at=where
        )
