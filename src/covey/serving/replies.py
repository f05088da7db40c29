"""Responses in OpenAI's format, whole or streamed, from the engine's completions."""

import codecs
import json
import re
import uuid
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from covey.data.thoughts import ThoughtStream, beginning_of
from covey.rollout.live import Top
from covey.serving.asking import APIRequest
from covey.serving.engine import Ended, Ticket, Token
from covey.serving.turns import final_text
from covey.types import Completion

Reported = tuple[int, "float | None", Top]
"""A token, its log-probability (None: nothing comes before it) and the likeliest tokens in its place."""


class Choice:
    """One completion of a request: in pieces while it is written, or whole."""

    def __init__(self, api_request: APIRequest, ticket: Ticket, sample: int, index: int, tokenizer: Any) -> None:
        self.api_request, self.ticket, self.tokenizer = api_request, ticket, tokenizer
        self.prompt_request, self.sample, self.index = ticket.prompt_request, sample, index
        self.reader = api_request.reader
        self.stream = TextStream(self.reader or tokenizer, self.prompt_request.params.stop)
        marks = None if self.reader is None else self.reader.marks
        self.thoughts = ThoughtStream(marks, self.reader.are_open(self._prompt_ids)) if self.reader and marks else None
        self.finish: str | None = None
        self.stop_reason: str | None = None
        self._unsent: list[Reported] = []
        self._offset, self._characters = 0, codecs.getincrementaldecoder("utf-8")("replace")
        self._seen, self._is_begun = 0, not api_request.echoes

    # -- in pieces --------------------------------------------------------------------------------------------------

    def begin(self) -> dict[str, Any] | None:
        """The piece before the first token: the role, or the echoed prompt."""
        if self.api_request.is_chat:
            return self._choice({"delta": {"role": "assistant", "content": ""}}, [])
        return self._choice({"text": self._prompt_text}, self._prompt_tokens()) if self.api_request.echoes else None

    def hear(self, event: Token | Ended) -> dict[str, Any] | None:
        """The piece that an event makes certain; None where there is nothing to send yet."""
        if isinstance(event, Ended):
            text = self._end(event.stopped)
        else:
            text = self.stream.push(event.token)
            self._unsent.append((event.token, event.logprob, event.top))
            if not text or (self.reader is not None and self.reader.is_whole):
                return None  # a call of a tool is read when it is whole
        text, tokens, self._unsent = self._space() + text, self._unsent, []
        if not self.api_request.is_chat:
            return self._choice({"text": text}, tokens)
        return self._choice({"delta": self._delta(text, is_end=isinstance(event, Ended))}, tokens)

    def _delta(self, text: str, is_end: bool) -> dict[str, Any]:
        if self.reader is not None and self.reader.is_whole:
            message = self._message()
            if "tool_calls" in message:
                message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
            return message
        thoughts, content = ("", text) if self.thoughts is None else self.thoughts.push(text, is_end)
        return {"content": content, **self._thoughts(thoughts)}

    def _thoughts(self, thoughts: str) -> dict[str, str]:
        """Under the names of SGLang and vLLM."""
        is_shown = thoughts and self.api_request.includes_reasoning
        return {"reasoning_content": thoughts, "reasoning": thoughts} if is_shown else {}

    def _end(self, stopped: bool) -> str:
        """Record the finish reason. Returns the rest of the text."""
        rest, self.stop_reason = self.stream.end()
        self.finish = "stop" if stopped else "length"
        return rest

    # -- whole ------------------------------------------------------------------------------------------------------

    def whole(self, completion: Completion | None) -> dict[str, Any]:
        """The finished choice. None: only the prompt was asked for."""
        ids = [] if completion is None else completion.token_ids.tolist()
        heard = [event for event in self.ticket.events if isinstance(event, Token) and event.sample == self.sample]
        tokens: list[Reported] = [(event.token, event.logprob, event.top) for event in heard]
        self.stream.token_ids = ids
        self._end(completion is not None and completion.finish == "stop")
        if self.api_request.is_chat:
            return self._choice({"message": {"role": "assistant", **self._message()}}, tokens)
        prefix = self._prompt_text if self.api_request.echoes else ""
        before = self._prompt_tokens() if self.api_request.echoes else []
        return self._choice({"text": prefix + self._space() + self.stream.whole}, [*before, *tokens], ids)

    # -- parts ------------------------------------------------------------------------------------------------------

    def _choice(self, content: dict[str, Any], tokens: list[Reported], ids: list[int] | None = None) -> dict[str, Any]:
        choice = {"index": self.index, **content, "logprobs": None, "finish_reason": self.finish}
        choice["stop_reason"] = self.stop_reason
        if self.prompt_request.num_top is not None and (tokens or self.finish):
            choice["logprobs"] = self._logprobs(tokens)
        if self.api_request.returns_ids:
            is_whole = "message" in content or ids is not None
            choice["token_ids"] = self.stream.token_ids if is_whole else [token for token, _, _ in tokens]
            if not self.api_request.is_chat:
                choice["prompt_token_ids"] = list(self._prompt_ids)
        return choice

    @cached_property
    def _prompt_text(self) -> str:
        text = self.prompt_request.prompt.text
        return str(self.tokenizer.decode(list(self._prompt_ids))) if text is None else text

    def _space(self) -> str:
        """The space between an echoed prompt and its completion that the decoder strips, once."""
        is_first, self._is_begun, ids = not self._is_begun, True, self.stream.token_ids[:1]
        is_stripped = is_first and ids and token_bytes(self.tokenizer, ids[0], begins=True)[:1] != b" "
        return " " if is_stripped and token_bytes(self.tokenizer, ids[0])[:1] == b" " else ""

    def _prompt_tokens(self) -> list[Reported]:
        if self.prompt_request.num_top is None:
            return []
        ids = self._prompt_ids
        scored = zip(ids[1:], self.ticket.scored, strict=True)
        return [(ids[0], None, ()), *((token, logprob, top) for token, (logprob, top) in scored)]

    @property
    def _prompt_ids(self) -> tuple[int, ...]:
        return self.prompt_request.prompt.token_ids

    def _message(self) -> dict[str, Any]:
        """Content, thoughts and tool calls. Sets `finish` to "tool_calls" where there are some."""
        if self.reader is None:
            return {"content": self.stream.whole}
        turn = self.reader.turn(self.stream.token_ids, self._prompt_ids)
        if not turn.calls:
            return {"content": turn.content, **self._thoughts(turn.thoughts)}
        self.finish = "tool_calls" if self.finish == "stop" else self.finish
        as_json = lambda value: json.dumps(value, ensure_ascii=False, default=str)
        functions = [{"name": call.name, "arguments": as_json(call.arguments)} for call in turn.calls]
        shown = [{"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": named} for named in functions]
        return {"content": turn.content or None, **self._thoughts(turn.thoughts), "tool_calls": shown}

    # -- log-probabilities ------------------------------------------------------------------------------------------

    def _logprobs(self, tokens: list[Reported]) -> dict[str, Any]:
        if self.api_request.is_chat:
            return {"content": [self._chat_logprob(*entry) for entry in tokens], "refusal": None}
        return self._legacy_logprobs(tokens)

    def _chat_logprob(self, token: int, logprob: float | None, top: Top) -> dict[str, Any]:
        begins, self._seen = not self._seen, self._seen + 1
        named = lambda token_id, value: {
            "token": self._name(token_id),
            "logprob": value if value is None else max(value, _LEAST),
            "bytes": list(token_bytes(self.tokenizer, token_id, begins=begins)),
        }
        return {**named(token, logprob), "top_logprobs": [named(*entry) for entry in top]}

    def _legacy_logprobs(self, tokens: list[Reported]) -> dict[str, Any]:
        """Of /v1/completions: lists of one entry a token. The token itself is always among the likeliest ones."""
        offsets, echoed = [], self._prompt_text if self.api_request.echoes else ""
        for token, _, _ in tokens:
            offsets.append(self._offset)
            begins, self._seen = not self._seen, self._seen + 1
            piece = self._characters.decode(token_bytes(self.tokenizer, token, begins=begins))
            is_hidden = self.tokenizer.decode([token]) != self.tokenizer.decode([token], skip_special_tokens=True)
            self._offset += 0 if is_hidden and not echoed.startswith(piece, self._offset) else len(piece)
        tops: list[dict[str, float] | None] = []
        for token, logprob, top in tokens:
            best: dict[str, float] = {}
            for token_id, value in () if logprob is None else (*top, (token, logprob)):
                best.setdefault(self._name(token_id), max(value, _LEAST))
            tops.append(best or None)
        return {
            "tokens": [self._name(token) for token, _, _ in tokens],
            "token_logprobs": [logprob if logprob is None else max(logprob, _LEAST) for _, logprob, _ in tokens],
            "top_logprobs": tops if self.prompt_request.num_top else None,
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        if self.api_request.names_by_id:
            return f"token_id:{token}"
        return token_bytes(self.tokenizer, token).decode(errors="replace")


def answer(
    api_request: APIRequest, call_id: str, created: int, choices: list[dict[str, Any]], version: int
) -> dict[str, Any]:
    """The body around choices, or around pieces of them."""
    kind = "chat.completion" if api_request.is_chat else "text_completion"
    kind += ".chunk" if api_request.is_chat and api_request.is_streamed else ""
    return {
        "id": call_id,
        "object": kind,
        "created": created,
        "model": api_request.model,
        "system_fingerprint": f"covey-weights-{version}",
        "weights_version": version,
        "choices": choices,
    }


def usage(api_request: APIRequest, tickets: Sequence[Ticket]) -> dict[str, int]:
    """Tokens of the request; each prompt counts once, however many answers it gets."""
    prompt = sum(len(prompt_request.prompt.token_ids) for prompt_request in api_request.prompt_requests)
    groups = [ticket.group for ticket in tickets if ticket.group is not None]
    written = sum(completion.num_tokens for group in groups for completion in group.completions)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


_LEAST = -9999.0
"""OpenAI's value for a token that is never drawn; JSON has no infinity."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@lru_cache(maxsize=1)
def _bytes_by_letter() -> dict[str, int]:
    """Letters by which byte-level BPE writes bytes (GPT-2's)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def token_bytes(tokenizer: Any, token_id: int, *, begins: bool = False) -> bytes:
    """The bytes that a token stands for, also where these are a part of a character.

    SentencePiece's mark is a space, which some decoders strip where a token `begins` a text, and so from one token alone.
    """
    text, piece = str(tokenizer.decode([token_id])), str(tokenizer.convert_ids_to_tokens(token_id))
    if "\ufffd" not in text:
        is_stripped = piece.startswith("\u2581") and not text.startswith((" ", "\u2581"))
        return f"{' ' if is_stripped and not begins else ''}{text}".encode()
    if match := _BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    letters = _bytes_by_letter()
    return bytes(letters[letter] for letter in piece) if all(letter in letters for letter in piece) else text.encode()


def new_id(is_chat: bool) -> str:
    return ("chatcmpl-" if is_chat else "cmpl-") + uuid.uuid4().hex


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
        held = max((beginning_of(self._text, stop_string) for stop_string in self._stop), default=0)
        return len(self._text) - held

    def _release(self, until: int) -> str:
        piece = self._text[self._sent : until]
        self._sent = max(self._sent, until)
        return piece
