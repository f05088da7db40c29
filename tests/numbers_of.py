"""Values that a parameter of a number may be tried with, and which parameters take one."""

import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from covey.errors import ConfigError

VALUES = ("x", None, math.nan, math.inf, -math.inf, -1, True, 10**400, [1])
_NUMBER = re.compile(
    r"\b(float|int|BelowOne|Bound|Count|CountOrZero|Finite|KLOption|LengthRatio|Limit|NotNegative|Positive|Share)\b"
)


def takes_number(parameter: inspect.Parameter) -> bool:
    return _NUMBER.search(str(parameter.annotation)) is not None


def refusal_of(make: Callable[..., Any], values: Mapping[str, Any]) -> str:
    """What `make(**values)` is refused with; empty where it is taken."""
    try:
        make(**values)
    except ConfigError as error:
        return str(error)
    return ""
