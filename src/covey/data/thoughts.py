"""Thoughts of a reasoning model: the words that mark them in a turn, as its chat template writes them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from covey.data.rendering import THOUGHT_FIELDS, control_ids

T = TypeVar("T")
_WORD = "qxthought"
_PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Marks that templates without such a field mention, as DeepSeek R1's does."""


@dataclass(frozen=True)
class ThoughtMarks:
    """The words around thoughts, and the field in which the template takes those of an earlier turn, if it has one."""

    opens: str
    closes: str
    field: str | None

    def split(self, text: str, is_open: bool) -> tuple[str, str]:
        """Thoughts of a turn's text, empty if it has none, and the rest. `is_open`: the prompt opened them."""
        return ThoughtStream(self, is_open).push(text, is_end=True)

    def are_open(self, tokenizer: Any, prompt_ids: Sequence[int]) -> bool:
        """True where a prompt ends in thoughts: with the word that opens them, or in a turn, the text behind the last control token, that
        does not close them behind that word. Where text of its line stands on both sides, the word is spoken of, and opens nothing."""
        decode = partial(tokenizer.decode, skip_special_tokens=False)
        if decode(list(prompt_ids[-16:])).rstrip().endswith(self.opens):
            return True
        marks = {*control_ids(tokenizer)} - {*tokenizer.convert_tokens_to_ids([self.opens, self.closes])}
        begin = next((i for i in range(len(prompt_ids), 0, -1) if prompt_ids[i - 1] in marks), 0)
        turn: str = decode(list(prompt_ids[begin:]))
        before, word, behind = turn.rpartition(self.opens)
        is_spoken_of = before.rpartition("\n")[2].strip() and behind.partition("\n")[0].strip()
        return bool(word) and self.closes not in behind and not is_spoken_of


_marks: dict[str, ThoughtMarks | None] = {}
"""By chat template: every request with tools asks for them."""


def thought_marks(tokenizer: Any) -> ThoughtMarks | None:
    """The marks of the thoughts in a tokenizer's chat template; None where it has none."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    if template not in _marks:
        _marks[template] = _learn_marks(tokenizer, template)
    return _marks[template]


def _learn_marks(tokenizer: Any, template: str) -> ThoughtMarks | None:
    ask = {"role": "user", "content": "qxquestion"}
    for field in THOUGHT_FIELDS:
        answer = {"role": "assistant", "content": "qxanswer", field: _WORD}
        try:
            text = str(tokenizer.apply_chat_template([ask, answer], tokenize=False))
        except Exception:  # noqa: BLE001 - a template is a program and may raise anything
            continue
        before, word, behind = text.partition(_WORD)
        opens, closes = last_word(before), last_word(behind, first=True)
        if word and opens[:1] in ("<", "[") and closes[:1] in ("<", "["):
            return ThoughtMarks(opens, closes, field)
    return next((ThoughtMarks(*pair, None) for pair in _PAIRS if pair[1] in template), None)


def last_word(text: str, *, first: bool = False) -> str:
    """The last tag or word before a call (`first`: the first one after it), which marks it. Empty where there is none."""
    text = text.strip()
    if first:
        match = re.match(r"<[^<>]*>|\[[^\[\]]*\]|\S+", text)
        return match.group() if match else ""
    if text.endswith("]") and "[" in text:
        return text[text.rfind("[") :]
    if "<" in text:
        return text[text.rfind("<") :]
    return text.split()[-1] if text else ""


def message_thoughts(message: Mapping[str, Any]) -> str:
    """The thoughts of a message, in the first of the fields for them that has some."""
    return str(next((message[name] for name in THOUGHT_FIELDS if message.get(name)), ""))


def without_thoughts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages without their fields for thoughts."""
    return [{name: value for name, value in message.items() if name not in THOUGHT_FIELDS} for message in messages]


def without_refused_thoughts(
    read: Callable[[Sequence[Mapping[str, Any]]], T], messages: Sequence[Mapping[str, Any]], refusal: type[Exception]
) -> T:
    """`read(messages)`; without their thoughts where the template refuses these, as gpt-oss' does with a text and a call."""
    try:
        return read(messages)
    except refusal:
        if not any(map(message_thoughts, messages)):
            raise
        return read(without_thoughts(messages))


class ThoughtStream:
    """Pieces of thoughts and of the text behind them, out of pieces of a turn's text.

    Thoughts that have no end are the whole turn. Spaces around thoughts belong to the template.
    """

    def __init__(self, marks: ThoughtMarks, is_open: bool) -> None:
        self._marks, self._is_open = marks, is_open
        self._place = "start"
        self._text = ""

    def push(self, piece: str, is_end: bool = False) -> tuple[str, str]:
        """The thoughts and the further text that one more piece makes certain."""
        self._text += piece
        thoughts = ""
        if self._place == "start":
            self._begin(is_end)
        if self._place in ("thoughts", "thinking"):
            thoughts = self._thoughts(is_end)
        if self._place == "gap":
            self._text = self._text.lstrip()
            self._place = "text" if self._text else "gap"
        text, self._text = (self._text, "") if self._place == "text" else ("", self._text)
        return thoughts, text

    def _begin(self, is_end: bool) -> None:
        text, opens = self._text.lstrip(), self._marks.opens
        if text.startswith(opens):
            self._place, self._text = "thoughts", text[len(opens) :]
        elif is_end or not opens.startswith(text):
            self._place = "thoughts" if self._is_open else "text"

    def _thoughts(self, is_end: bool) -> str:
        """Certain thoughts; spaces wait for what follows them, and so does the beginning of the closing word."""
        text = self._text.lstrip() if self._place == "thoughts" else self._text
        done, closes, rest = text.partition(self._marks.closes)
        if closes:
            self._place, self._text = "gap", rest
            return done.rstrip()
        certain = len(text) if is_end else len(text) - beginning_of(text, self._marks.closes)
        done = text[:certain].rstrip()
        self._place, self._text = "thinking" if done else self._place, text[len(done) :]
        return done


def beginning_of(text: str, word: str) -> int:
    """Length of the longest end of `text` that begins `word` and is not all of it."""
    return next((size for size in range(min(len(text), len(word) - 1), 0, -1) if text.endswith(word[:size])), 0)
