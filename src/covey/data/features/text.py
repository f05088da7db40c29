"""Features of a text alone: its length and its readability."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")  # noqa: RUF001 - the typographic apostrophe is one
_SENTENCE_END = re.compile(r"[.!?…]+(?=\s|$)|\n{2,}")
_VOWELS = re.compile(r"[aeiouyäöüéèêàâîïôûáíóúãõ]+")
_SILENT = re.compile(r"(?<=[^aeiouyl])e(?:s|d)?$")


def prompt_text(prompt: Any) -> str:
    """The text of a prompt; for a conversation the contents of its messages, joined."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message.get("content") or "") for message in messages_of(prompt))


def messages_of(prompt: Any) -> Sequence[Mapping[str, Any]]:
    """The messages of a conversation, none for what is no list of them."""
    return [message for message in prompt if isinstance(message, Mapping)] if isinstance(prompt, list | tuple) else []


def readability(text: str) -> float | None:
    """Flesch's reading ease: about 90 for a child's book, 30 for a scientific paper. `None` for a text without a word.

    `206.835 - 1.015 words/sentence - 84.6 syllables/word` (Flesch 1948, "A new readability yardstick"), made for English;
    syllables are counted as groups of vowels, without a silent e at the end.
    """
    words = _WORD.findall(text)
    if not words:
        return None
    pieces = [piece for piece in _SENTENCE_END.split(text) if _WORD.search(piece)]
    syllables = sum(_syllables(word.casefold()) for word in words)
    return 206.835 - 1.015 * len(words) / len(pieces) - 84.6 * syllables / len(words)


def _syllables(word: str) -> int:
    return max(1, len(_VOWELS.findall(_SILENT.sub("", word))))
