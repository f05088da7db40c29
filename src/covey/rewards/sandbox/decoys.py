"""Decoys: values other than the expected one, compared beside it with an object whose own `__eq__` decides.

An honest object says yes to the expected value alone; one that always says yes says so to these as well. Standard library only.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
from collections import Counter, OrderedDict, deque
from os import urandom
from typing import Any

_STEPS = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181, 191, 193, 197, 199)
"""Primes, so that a number modulo another does not come out the same; the nearest neighbours are decoys as well."""
NUM_DECOYS = 6
FOREIGN: tuple[Any, ...] = ("nothing like it", -918273645, ("neither", "this"), None)
"""Values that an object of the program's own must not equal."""


def near(value: Any) -> list[Any]:
    """Values of the same kind as `value`, none of them equal to it."""
    found: list[Any] = []
    for number in range(NUM_DECOYS):
        step = (_STEPS[urandom(1)[0] % len(_STEPS)] if number > 1 else 1) * (1 if number % 2 else -1)
        other = _moved(value, step)
        if not (other == value or any(other == known for known in found)):
            found.append(other)
    return found


def far(value: Any) -> list[Any]:
    """A value below and one above all that is likely to be compared with `value`."""
    if type(value) in (int, float, decimal.Decimal, fractions.Fraction):
        reach: Any = 10**12 + abs(value) * 1000 if value == value and abs(value) != float("inf") else 10**12
        return [-reach, reach]
    return ["", "\U0010ffff" * 4] if isinstance(value, str) else []


def shuffled(items: list[Any]) -> list[Any]:
    """`items` in an unpredictable order."""
    return [item for _, item in sorted(((urandom(8), item) for item in items), key=lambda pair: pair[0])]


def almost(first: Any, second: Any, places: int = 7) -> bool:
    """The comparison that unittest's `assertAlmostEqual` makes."""
    return bool(first == second or round(abs(first - second), places) == 0)


def _moved(value: Any, step: Any) -> Any:
    kind = type(value)
    if kind is bool:
        return not value
    if kind in (int, complex, fractions.Fraction, decimal.Decimal):
        return value + step
    if kind is float:
        moved = value + step * 0.6180339887
        return moved if abs(moved) < 1e15 else float(step)
    if kind in (str, bytes):
        letter = "zqjxkvw"[urandom(1)[0] % 7]
        text = letter if abs(step) == 1 and value else f"{letter}{abs(step)}"
        return value[: len(value) // 2] + (text if kind is str else text.encode()) + value[len(value) // 2 + 1 :]
    if kind in (list, tuple, deque, set, frozenset):
        return kind(_moved(item, step) for item in value) if value else kind([step])
    if kind in (dict, OrderedDict, Counter):
        moved = {_moved(key, step): _moved(item, step) for key, item in value.items()}
        return kind(moved or {step: step})
    return _moved_rarely(value, kind, step)


def _moved_rarely(value: Any, kind: type, step: int) -> Any:
    if kind is bytearray:
        return value + bytes([step])
    if kind is range:
        return range(value.start + step, value.stop + 2 * step, value.step)
    if kind is datetime.timedelta or kind in (datetime.date, datetime.datetime):
        day = datetime.timedelta(days=step)
        try:
            return value + day
        except OverflowError:
            return value - day
    return FOREIGN[step % len(FOREIGN) - 1] if value is None else step
