"""Turns of a chat as clients get them: content, thoughts and calls of tools apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from covey.data.thoughts import ThoughtMarks, message_thoughts
from covey.environments import Template
from covey.environments.call_forms import WrittenCall, typed_call
from covey.environments.messages import message_in, without_specials

_ASK = {"role": "user", "content": "qxquestion"}


@dataclass(frozen=True)
class Turn:
    """One turn of a model."""

    content: str
    thoughts: str = ""
    calls: tuple[WrittenCall, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class TurnReader:
    """Reads the turns that answer one request."""

    tokenizer: Any
    render: Callable[[Sequence[Mapping[str, Any]], bool], list[int]]
    """Token ids of messages through the chat template, with (True) or without the beginning of the model's turn."""
    template: Template | None = None
    """Reader of tool calls. None: the model was shown no tools."""
    marks: ThoughtMarks | None = None
    """Marks of thoughts. None: the template has none, or the client wants the text whole."""
    has_form: bool = False
    """True if channels or a response template tell thoughts apart."""
    stop: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """The template's options, tools among them."""

    @property
    def is_whole(self) -> bool:
        """True if a turn can be read only once it is whole."""
        return self.template is not None or self.has_form

    def turn(self, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> Turn:
        """The turn behind a prompt.

        A call that cannot be read leaves the whole turn a text. Calls within thoughts are none, unless the thoughts have no end.
        """
        if self.template is not None and (turn := self._with_calls(token_ids, prompt_ids)) is not None:
            return turn
        text, _ = final_text(self, token_ids, self.stop)
        if self.has_form:
            message = message_in(self.tokenizer, token_ids, prompt_ids, self.options.get("tools"))
            return Turn(text) if message is None else Turn(message["content"], message_thoughts(message))
        return Turn(text) if self.marks is None else self._apart(text, prompt_ids)

    def are_open(self, prompt_ids: Sequence[int]) -> bool:
        """True where a prompt has opened the thoughts of its answer."""
        return self.marks is not None and self.marks.are_open(self.tokenizer, prompt_ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens, in which marks of thoughts stay where they are special tokens."""
        if not self._marks_as_tokens:
            return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        hidden = {*self.tokenizer.all_special_ids} - self._marks_as_tokens
        shown = [token for token in token_ids if not (skip_special_tokens and token in hidden)]
        return str(self.tokenizer.decode(shown, skip_special_tokens=False))

    def behind(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], int] | None:
        """Ids of a short conversation with a model's turn and what follows it, and where that turn begins.

        None where what follows the turn changes what came before it.
        """
        try:
            before, whole = self.render([_ASK], False), self.render([_ASK, *messages], True)
        except Exception:  # noqa: BLE001 - a template is a program and may raise anything
            return None
        return (whole, len(before)) if whole[: len(before)] == before else None

    @cached_property
    def _marks_as_tokens(self) -> frozenset[int]:
        if self.marks is None:
            return frozenset()
        ids = self.tokenizer.convert_tokens_to_ids([self.marks.opens, self.marks.closes])
        return frozenset(ids) & frozenset(self.tokenizer.all_special_ids)

    def _apart(self, text: str, prompt_ids: Sequence[int]) -> Turn:
        assert self.marks is not None  # asked before
        thoughts, content = self.marks.split(text, self.are_open(prompt_ids))
        return Turn(content, thoughts)

    def _with_calls(self, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> Turn | None:
        assert self.template is not None  # asked before
        head, text, calls, held = self.template.parts_in(token_ids, prompt_ids)
        if not calls or any(call.problem for call in calls):
            return None
        turn = Turn(text, message_thoughts(held))
        if self.marks is not None:
            first = self._apart(head or text, prompt_ids)
            turn = Turn(text if head else first.content, without_specials(first.thoughts, self.tokenizer))
        return replace(turn, calls=tuple(self._typed(call) for call in calls))

    def _typed(self, call: WrittenCall) -> WrittenCall:
        tools = self.options.get("tools", ())
        schema: Mapping[str, Any] = next(
            (tool["function"] for tool in tools if tool["function"]["name"] == call.name), {}
        )
        return typed_call(call, (schema.get("parameters") or {}).get("properties") or {})


def final_text(tokenizer: Any, token_ids: Sequence[int], stop: Sequence[str]) -> tuple[str, str | None]:
    """Text of a whole completion without special tokens, cut before the first stop string; and that string, if any."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    hits = [(text.index(stop_string), stop_string) for stop_string in stop if stop_string in text]
    if not hits:
        return text, None
    at, reason = min(hits)
    return text[:at], reason
