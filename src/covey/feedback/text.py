"""Cleaning of texts that clients send; and hashes that recognize prompts of the fixed set."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Sequence

from covey.types import Prompt

_DROPPED = frozenset({"Cc", "Cs", "Co", "Cn"})


def cleaned(text: str) -> str:
    """The text in Unicode's form NFC without control characters, lone surrogates and unassigned characters; line ends as `\\n`."""
    lines = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
    return "".join(char for char in lines if char in "\n\t" or unicodedata.category(char) not in _DROPPED).strip()


def marks(prompt: Prompt) -> set[str]:
    """Hashes that identify a prompt: of its token ids, and of its text or last user message without spaces at the ends, in any case."""
    hashes = {_hash(list(prompt.token_ids))}
    user_texts = [str(message.get("content", "")) for message in prompt.messages or () if message.get("role") == "user"]
    text = user_texts[-1] if user_texts else prompt.text
    if text is not None and text.strip():
        hashes.add(_hash(" ".join(unicodedata.normalize("NFKC", text).casefold().split())))
    return hashes


def marks_of(prompts: Iterable[Prompt]) -> frozenset[str]:
    return frozenset(mark for prompt in prompts for mark in marks(prompt))


def _hash(value: str | Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
