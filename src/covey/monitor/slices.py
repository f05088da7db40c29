"""The reward by the values of a data set's columns: which language, task or level is learnt, and which is not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from covey.errors import ConfigError, did_you_mean
from covey.monitor.measures import total_of
from covey.types import Group, Mean, Metric

MAX_VALUES = 20
"""Values of a column that get a metric of their own; the others share one."""
OTHER = "other"


def refuse_unknown_columns(columns: Sequence[str], known: Collection[str] | None) -> None:
    """Raise ConfigError for a column of `metrics_by` that the data set does not have. `known` None: not told."""
    for column in columns if known is not None else ():
        if column not in known:  # type: ignore[operator]
            has = f"the data set has {', '.join(known)}."  # type: ignore[arg-type]
            raise ConfigError(f"metrics_by names the column {column!r}, but {has}{did_you_mean(column, known or ())}")


class Slices:
    """Remembers which values have a name, the first twenty of each column in the order in which they were met."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        self._known: dict[str, list[str]] = {column: [] for column in columns}

    def __call__(self, groups: Sequence[Group], weights: Tensor) -> dict[str, Metric]:
        """`reward/<column>=<value>`, the mean weighted reward of its completions; `other` once there are too many values."""
        found: dict[str, Metric] = {}
        for group in groups:
            total = total_of(group, weights)  # [G]
            reward = Mean.of(total, ~total.isnan())
            for column in self.columns:
                name = f"reward/{column}={self._value(column, group.prompt.columns.get(column))}"
                before = found.get(name)
                found[name] = before + reward if isinstance(before, Mean) else reward
        return found

    def _value(self, column: str, value: Any) -> str:
        text, known = str(value)[:40], self._known[column]
        if text in known:
            return text
        if len(known) >= MAX_VALUES:
            return OTHER
        known.append(text)
        return text

    def state_dict(self) -> dict[str, Any]:
        return {column: list(values) for column, values in self._known.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._known |= {column: list(values) for column, values in state.items() if column in self._known}
