"""Keys of the states that a model's turns begin in: equal keys, equal states."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from covey.types import Message


def states_of(messages: Sequence[Message], first: Any = ()) -> tuple[str, ...]:
    """[K], for each of the assistant's messages a key of what stands between it and the one before; `first` is before them all."""
    keys, seen = [], [first]
    for message in messages:
        if message["role"] != "assistant":
            seen.append(_said(message))
            continue
        keys.append(digest(seen))
        seen = []
    return tuple(keys)


def state_before(messages: Sequence[Message]) -> str:
    """Key of the messages behind the assistant's last one."""
    said = [one["role"] == "assistant" for one in messages]
    new = messages[len(said) - said[::-1].index(True) :] if any(said) else messages
    return digest([_said(one) for one in new])


def digest(value: Any) -> str:
    """A short key of a value that JSON can write."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def _said(message: Message) -> list[Any]:
    return [message.get("role"), message.get("content")]
