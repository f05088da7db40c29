"""Copies of a reward's inputs, so that in-place changes do not reach other rewards."""

import copy
from collections.abc import Mapping
from typing import Any

_FIXED = frozenset({str, int, float, bool, bytes, complex, type(None)})
_SHARED = frozenset({"log_extra", "log_metric", "environments"})


def copied_inputs(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords with lists and dicts of their own, to any depth.

    Text and numbers are shared, since they are immutable; so a column of long texts costs one list. Lists and dicts are
    copied for each completion, as a data set gives them; an array, a tensor or another object once for each row.
    """
    memo: dict[int, Any] = {}
    return {name: value if name in _SHARED else _copy(value, memo) for name, value in keywords.items()}


def copied_state(trainer_state: Any) -> Any:
    """A copy of the trainer's state whose log, lists and dicts are its own; an object that cannot be copied as it is."""
    if trainer_state is None:
        return None
    try:
        mine = copy.copy(trainer_state)
        for name, value in list(vars(mine).items()):
            # thousands of dicts of numbers: one copy each, without looking into them
            setattr(mine, name, [dict(line) for line in value] if name == "log_history" else _copy(value, {}))
    except Exception:  # noqa: BLE001 - a state of the caller's own making
        return trainer_state
    return mine


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in _FIXED:
        return value
    if kind is list:
        return [item if type(item) in _FIXED else _copy(item, memo) for item in value]
    if kind is dict:
        return {key: item if type(item) in _FIXED else _copy(item, memo) for key, item in value.items()}
    if kind is tuple:
        return tuple(_copy(item, memo) for item in value)
    if id(value) not in memo:
        memo[id(value)] = _object(value)
    return memo[id(value)]


def _object(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - a lock, an open file: it stays shared
        return value
