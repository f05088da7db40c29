"""Query parameters of a request, validated."""

import math
from collections.abc import Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

_LONGEST = 1000
_MISSING = object()


def text(request: Request, name: str, default: Any = _MISSING) -> str:
    """A text of at most 1000 characters; 400 when it is needed and not there."""
    value = request.query_params.get(name)
    if value is None and default is _MISSING:
        raise HTTPException(400, f"{name} is missing.")
    value = default if value is None else value
    if len(value) > _LONGEST:
        raise HTTPException(400, f"{name} is longer than {_LONGEST} characters.")
    return str(value)


def number(request: Request, name: str) -> float | None:
    """A finite number, or None when nothing was given."""
    raw = request.query_params.get(name)
    if not raw:
        return None
    try:
        value = float(raw)
    except ValueError as error:
        raise HTTPException(400, f"{name} is not a number.") from error
    if not math.isfinite(value):
        raise HTTPException(400, f"{name} is not a finite number.")
    return value


def whole(request: Request, name: str, default: Any, *, low: int, high: int) -> Any:
    """A whole number between `low` and `high`, or the default when nothing was given."""
    raw = request.query_params.get(name)
    if not raw:
        return default
    if not raw.isascii() or not raw.isdigit() or not low <= int(raw[:30]) <= high:
        raise HTTPException(400, f"{name} is not a whole number from {low} to {high}.")
    return int(raw)


def flag(request: Request, name: str) -> bool:
    """True if the query parameter is set to 1, true, yes or on."""
    return request.query_params.get(name, "") in ("1", "true", "yes", "on")


def one_of(request: Request, name: str, choices: Sequence[str], default: str) -> str:
    """One of the choices; 400 otherwise."""
    value = request.query_params.get(name) or default
    if value not in choices:
        raise HTTPException(400, f"{name} is none of {', '.join(choices)}.")
    return value
