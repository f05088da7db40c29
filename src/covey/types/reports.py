"""Reports: events, the report of an optimizer step, and alerts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from covey.types.metrics import Metric, merge_metrics

TokenNumbers = Mapping[str, Sequence[Sequence[Tensor | None]]]
"""Per-token values by name, group and completion: one number a token [T]; None where it was not measured."""


SKIPS = frozenset({"non_finite_step", "spike_skipped"})
"""Kinds of events of a skipped update."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened and should be seen: a reward that failed, a prompt that was dropped."""

    kind: str
    said: str
    """One sentence."""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def skips_update(self) -> bool:
        """True if the update was skipped for non-finite numbers or a spike."""
        return self.kind in SKIPS


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Report of one optimizer step. `report["kl"]` is a plain float, NaN when the metric is absent."""

    step: int
    metrics: Mapping[str, Metric]
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time by phase: rollout, reward, learn, ..."""
    events: tuple[Event, ...] = ()
    tokens: TokenNumbers = field(default_factory=dict)
    """Measurements of single tokens, of a step whose rollouts are written down."""

    def __getitem__(self, name: str) -> float:
        return self.metrics[name].value if name in self.metrics else math.nan

    @property
    def skips_update(self) -> bool:
        """True if the weights did not change, for non-finite numbers or a spike."""
        return any(event.skips_update for event in self.events)

    def merged(self, metrics: Mapping[str, Metric]) -> StepReport:
        """The same report with more metrics added."""
        return replace(self, metrics=merge_metrics([self.metrics, metrics]))


@dataclass(frozen=True, kw_only=True)
class Alert:
    """Finding of a monitor, with its evidence and fixes to try."""

    rule: str
    severity: Literal["info", "warning", "error"]
    said: str
    step: int
    evidence: Mapping[str, Any] = field(default_factory=dict)
    try_this: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    """Names of the parts of the run that have the fault, such as rewards or sets; empty: the run as a whole."""

    def __post_init__(self) -> None:
        """One text is one entry, and None is none: detectors are also users' code."""
        for name in ("try_this", "parts"):
            value: Any = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))
