"""Fields of a request's JSON body: each read once with its type and bounds; unknown names are refused."""

import logging
from collections.abc import Mapping
from typing import Any

from covey.errors import did_you_mean
from covey.serving.errors import bad

logger = logging.getLogger(__name__)

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "logit_bias": ({}, None),
    "suffix": ("", None),
    "functions": ([], None),
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "response_format": (None, {"type": "text"}),
    "length_penalty": (None, 1),
    "use_beam_search": (None, False),
    "min_tokens": (None, 0),
    "stop_token_ids": (None, []),
    "parallel_tool_calls": (None, True),
}
"""Parameters that Covey does not honour, and the values that ask for nothing."""
WITHOUT_EFFECT = (
    "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options",
)  # fmt: skip
"""Accepted: no answer depends on them."""
_warned: set[str] = set()
_LARGEST, _LARGEST_NUMBER = 2**63 - 1, 1e300


class Fields:
    """A JSON object, read field by field; `rest` refuses what is left."""

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise bad("The body must be a JSON object.")
        self._left = dict(body)
        self._read: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """The value as it is; null counts as left out."""
        self._read.add(name)
        value = self._left.pop(name, None)
        return default if value is None else value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise bad(f"{name} is {_format(value)}; give true or false.", name)
        return value

    def whole(self, name: str, default: Any, low: int | None = None, high: int | None = None) -> Any:
        """A whole number between `low` and `high`, or `default`."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad(f"{name} is {_format(value)}; give a whole number.", name)
        if abs(value) > _LARGEST:
            raise bad(f"{name} is {_format(value)}; give a number of 64 bits.", name)
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f"{low} or more" if high is None else f"{low} to {high}"
            raise bad(f"{name} is {value}; give {bounds}.", name)
        return value

    def number(self, name: str, default: Any) -> Any:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST_NUMBER:
            raise bad(f"{name} is {_format(value)}; give a number.", name)
        return value

    def text(self, name: str, default: Any = None) -> Any:
        value = self.take(name, default)
        if value is not None and not isinstance(value, str):
            raise bad(f"{name} is {_format(value)}; give a text.", name)
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.take(name, {})
        if not isinstance(value, dict):
            raise bad(f"{name} is {_format(value)}; give a JSON object.", name)
        return value

    def rest(self) -> None:
        """Raise for a field that would be ignored though it asks for something."""
        for name, value in self._left.items():
            if name in NEUTRAL:
                if not any(value == neutral for neutral in NEUTRAL[name]):
                    raise bad(f"{name} is not supported; leave it out.", name, "unsupported_parameter")
            elif name in WITHOUT_EFFECT:
                if value is not None and name not in _warned:
                    _warned.add(name)
                    logger.info("A client sends %s, which changes no answer here.", name)
            elif value is not None:
                near = did_you_mean(name, {*self._read, *NEUTRAL})
                raise bad(f"{_format(name)} is not a parameter of this endpoint.{near}", name, "unknown_parameter")


def _format(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**80 else "a number of many digits"
    return text if len(text) <= 80 else text[:77] + "..."
