"""An episode as the page shows it: its messages with roles, texts and calls of tools, whatever a file claims to hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MOST_MESSAGES = 200
_LONGEST = 20_000


def conversation_of(text: Any) -> list[dict[str, Any]] | None:
    """Messages as `role`, `content`, and of calls `name` and `arguments`, bounded; None where the row holds no conversation."""
    if not isinstance(text, str):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, list):
        return None
    return [_message(one) for one in found[:_MOST_MESSAGES] if isinstance(one, Mapping)]


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    calls = given.get("tool_calls")
    known = [one.get("function") for one in calls if isinstance(one, Mapping)] if isinstance(calls, list) else []
    return {
        "role": _text(given.get("role")),
        "name": _text(given.get("name")),
        "content": _text(given.get("content")),
        "calls": [
            {"name": _text(one.get("name")), "arguments": _text(one.get("arguments"))}
            for one in known[:_MOST_MESSAGES]
            if isinstance(one, Mapping)
        ],
    }


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
    return text[:_LONGEST]
