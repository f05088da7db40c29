"""Keys of the states that a model's turns begin in: equal keys, equal states."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from covey.types import Message


def states_of(messages: Sequence[Message], first: Any = ()) -> tuple[str, ...]:
    """[K] state keys: for each of the assistant's messages, a hash of the messages since the one before; `first` precedes all."""
    keys, seen = [], [first]
    for message in messages:
        if message["role"] != "assistant":
            seen.append(_role_and_content(message))
            continue
        keys.append(digest(seen))
        seen = []
    return tuple(keys)


def state_before(messages: Sequence[Message]) -> str:
    """State key: a hash of the messages after the assistant's last one."""
    is_answer = [message["role"] == "assistant" for message in messages]
    new = messages[len(is_answer) - is_answer[::-1].index(True) :] if any(is_answer) else messages
    return digest([_role_and_content(message) for message in new])


def digest(value: Any) -> str:
    """A short key of a value that JSON can write."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def _role_and_content(message: Message) -> list[Any]:
    return [message.get("role"), message.get("content")]
