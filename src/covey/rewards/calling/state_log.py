"""The log of a trainer's state as rewards get it: copied where one reads it, and sent to a worker process only once."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

LOG_NAMES = frozenset({"log_history", "_source", "_read"})
"""Attributes that hold the log of a state, or of a copy."""


class StateLog:
    """A mix-in of a state with a `log_history` of its own, copied when it is first read.

    The log grows by some sixty numbers a step, and few rewards read it.
    """

    _source: tuple[list[dict[str, Any]] | None, int]
    """The trainer's own log, and how many of its entries there were."""

    @property
    def log_history(self) -> list[dict[str, Any]] | None:
        if "_read" not in vars(self):
            entries, count = self._source
            self._read = None if entries is None else [dict(entry) for entry in entries[:count]]
        return self._read

    @log_history.setter
    def log_history(self, value: list[dict[str, Any]] | None) -> None:
        self._read = value

    def __reduce__(self) -> Any:
        kind = type(self).__mro__[2]
        rest = {name: value for name, value in vars(self).items() if name not in LOG_NAMES}
        return _plain_state, (kind, {**rest, "log_history": self.log_history})


@lru_cache(maxsize=16)
def _kind_of(kind: type) -> Any:
    return kind if issubclass(kind, StateLog) else type(kind.__name__, (StateLog, kind), {})


def with_log(kind: type, rest: Mapping[str, Any], log: list[dict[str, Any]] | None) -> Any:
    """A state of the class `kind` with the attributes `rest` and a copy of `log`, made when it is read."""
    lazy = _kind_of(kind)
    mine = lazy.__new__(lazy)
    vars(mine).update(rest, _source=(log, len(log or ())))
    return mine


def log_of(state: Any) -> tuple[list[dict[str, Any]], int]:
    """The log of a state, which is not copied, and how many of its entries count."""
    log, count = getattr(state, "_source", None) or (getattr(state, "log_history", None), None)
    return log or [], len(log or ()) if count is None else count


def _plain_state(kind: Any, attributes: dict[str, Any]) -> Any:
    state = kind.__new__(kind)
    vars(state).update(attributes)
    return state
