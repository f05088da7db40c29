"""Tool calls whose keys are bare words: Gemma 4's `call:NAME{key:<|"|>text<|"|>}`, Python's `NAME(key='text')` of LFM2, Llama 4 and OLMo 3."""

import ast
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from covey.data.thoughts import last_word
from covey.environments.call_forms import KEYS, NAME, VALUES, WrittenCall, literal, writable

_MOST_CLOSERS = 64
"""Brackets at which a list or an object of Python is looked for to end."""
_CLOSERS = {"{": "}", "(": ")"}
_KEY = re.compile(r"\s*,?\s*[\"']?([^\s,:=\"'{}\[\]()][^,:=\"'{}\[\]()]*?)[\"']?\s*[:=]\s*")
_ATOM = re.compile(r"[^,)\]}]+")


def keyed_form(body: str) -> Callable[[str], tuple[str, list[WrittenCall]]] | None:
    """`NAME{key:value,...}` or `NAME(key=value, ...)`, with the marks around a text as `body` has them."""
    places = [body.find(word) for word in (NAME, KEYS[0], VALUES[0], KEYS[1])]
    if -1 in places or places != sorted(places):
        return None
    name, key, value, second = places
    opens = body[name + len(NAME) : key]
    before, behind = body[key + len(KEYS[0]) : value], body[value + len(VALUES[0]) : second]
    quote = next((before[i:] for i in range(1, len(before)) if behind.startswith(before[i:])), "")
    if opens not in _CLOSERS or before.removesuffix(quote).strip() not in (":", "=") or not quote:
        return None
    return _KeyedCalls(last_word(body[:name]), opens, quote)


@dataclass(frozen=True)
class _KeyedCalls:
    opener: str
    opens: str
    quote: str

    def __call__(self, text: str) -> tuple[str, list[WrittenCall]]:
        text = text.strip()
        name = rf"\s*([\w.\-]+){re.escape(self.opens)}"
        start, further = re.compile(re.escape(self.opener) + name), re.compile(r"\s*,?" + name)
        is_marked = bool(self.opener.strip("[("))  # else a call is a turn that is calls from its first character on
        match = start.search(text) if is_marked else start.match(text)
        first, calls = match.start() if match else len(text), list[WrittenCall]()
        while match:
            at = match.end()
            try:
                arguments, at = self._pairs(text, at, _CLOSERS[self.opens])
                calls.append(WrittenCall(match.group(1), writable(arguments)))
            except (ValueError, TypeError, RecursionError) as error:
                problem = f"the call's arguments cannot be read ({error}); write it again"
                calls.append(WrittenCall(match.group(1), text[at:][:200], problem))
            match = further.match(text, at) or (start.search(text, at) if is_marked else None)
        return text[:first].strip(), calls

    def _pairs(self, text: str, at: int, closer: str) -> tuple[dict[str, Any], int]:
        """Arguments up to `closer`, and where they end. Raises ValueError where they cannot be read."""
        pairs, end = dict[str, Any](), re.compile(r"\s*,?\s*" + re.escape(closer))
        while not (stop := end.match(text, at)):
            key = _KEY.match(text, at)
            if key is None:
                raise ValueError(f"a key is missing before {text[at : at + 20]!r}")
            pairs[key.group(1)], at = self._value(text, key.end())
        return pairs, stop.end()

    def _value(self, text: str, at: int) -> tuple[Any, int]:
        marks = (self.quote,) if len(self.quote) > 1 else ('"', "'")
        mark = next((mark for mark in marks if text.startswith(mark, at)), None)
        if mark is not None:
            return _quoted(text, at + len(mark), mark)
        if text[at : at + 1] in ("{", "["):
            read = self._whole(text, at)
            if read is not None:
                return read
            return self._pairs(text, at + 1, "}") if text[at] == "{" else self._items(text, at + 1)
        atom = _ATOM.match(text, at)
        if atom is None:
            raise ValueError(f"a value is missing before {text[at : at + 20]!r}")
        return literal(atom.group().strip()), atom.end()

    def _whole(self, text: str, at: int) -> tuple[Any, int] | None:
        """A list or an object as JSON, or as Python writes it, and where it ends; None where it is neither."""
        with suppress(ValueError):
            return json.JSONDecoder().raw_decode(text, at)
        closer = {"{": "}", "[": "]"}[text[at]]
        ends = (match.end() for match in islice(re.finditer(re.escape(closer), text[at:]), _MOST_CLOSERS))
        for end in ends if len(self.quote) == 1 else ():
            with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                return ast.literal_eval(text[at : at + end]), at + end
        return None

    def _items(self, text: str, at: int) -> tuple[list[Any], int]:
        items, end, between = list[Any](), re.compile(r"\s*,?\s*\]"), re.compile(r"\s*,?\s*")
        while not (stop := end.match(text, at)):
            comma = between.match(text, at)
            value, at = self._value(text, comma.end() if comma else at)
            items.append(value)
        return items, stop.end()


def _quoted(text: str, at: int, mark: str) -> tuple[str, int]:
    """The text up to `mark`, and where it ends. Templates do not escape: an apostrophe ends a text only where a value may end."""
    ends = re.escape(mark) if len(mark) > 1 else rf"(?<!\\){mark}(?=\s*(?:[,)\]}}]|$))"
    stop = re.compile(ends).search(text, at)
    if stop is None:
        raise ValueError("a text has no end")
    return text[at : stop.start()].replace("\\" + mark, mark), stop.end()
