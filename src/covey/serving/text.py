"""Incremental detokenization that holds back text which may be part of a stop string."""

from collections.abc import Sequence
from typing import Any


def final_text(tokenizer: Any, token_ids: Sequence[int], stop: Sequence[str]) -> tuple[str, str | None]:
    """Text of a whole completion without special tokens, cut before the first stop string; and that string, if any."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    hits = [(text.index(stop_string), stop_string) for stop_string in stop if stop_string in text]
    if not hits:
        return text, None
    at, reason = min(hits)
    return text[:at], reason


class TextStream:
    """Pieces of a completion's text. Together they are `final_text`."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self.token_ids: list[int] = []
        self._start = self._read = 0
        self._text = ""
        self._sent = 0

    def push(self, token: int) -> str:
        """The text that is certain after one more token: whole characters, and no beginning of a stop string."""
        self.token_ids.append(token)
        decode = lambda ids: self._tokenizer.decode(ids, skip_special_tokens=True)
        before, now = decode(self.token_ids[self._start : self._read]), decode(self.token_ids[self._start :])
        if len(now) > len(before) and not now.endswith("\ufffd"):
            self._text += now[len(before) :]
            self._start, self._read = self._read, len(self.token_ids)
        return self._release(self._certain())

    def end(self) -> tuple[str, str | None]:
        """The rest of the text, and the stop string that ended it."""
        self._text, reason = final_text(self._tokenizer, self.token_ids, self._stop)
        return self._release(len(self._text)), reason

    @property
    def whole(self) -> str:
        """All of the text, once it has ended."""
        return self._text

    def _certain(self) -> int:
        hits = [self._text.index(stop_string) for stop_string in self._stop if stop_string in self._text]
        if hits:
            return min(hits)
        held = max((_overlap(self._text, stop_string) for stop_string in self._stop), default=0)
        return len(self._text) - held

    def _release(self, until: int) -> str:
        piece = self._text[self._sent : until]
        self._sent = max(self._sent, until)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
