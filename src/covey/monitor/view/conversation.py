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
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(messages, list):
        return None
    return [_message(message) for message in messages[:_MOST_MESSAGES] if isinstance(message, Mapping)]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    return {
        "role": _text(message.get("role")),
        "name": _text(message.get("name")),
        "content": _text(message.get("content")),
        "calls": [
            {"name": _text(function.get("name")), "arguments": _text(function.get("arguments"))}
            for function in functions[:_MOST_MESSAGES]
            if isinstance(function, Mapping)
        ],
    }


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
    return text[:_LONGEST]
