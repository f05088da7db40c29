"""Chat templates in episodes: the form of a tool call, and the tokens between a model's turn and its next.

Both are inferred from the template once, by rendering conversations with known words. So tokens that the model wrote are never
rendered again: only the answer's tokens are, and they follow the model's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.data import chat_ids
from covey.errors import ModelError
from covey.types import Message

_NAME, _KEYS, _VALUES = "qxname", ("qxkeya", "qxkeyb"), ("qxvaluea", "qxvalueb")
_ID = "qxcall001"
"""Nine letters and digits, which Mistral's templates insist on."""
_ASK = {"role": "user", "content": "qxquestion"}


@dataclass(frozen=True)
class WrittenCall:
    """A tool call as the model wrote it. `problem` says why it could not be read, else None."""

    name: str
    arguments: Any
    problem: str | None = None


class Template:
    """The chat template of a tokenizer, as episodes use it. `options` are keyword arguments of `apply_chat_template`.

    Raises ModelError where the template has no tool calls, or where an answer changes what came before it.
    """

    def __init__(
        self, tokenizer: Any, eos_ids: Sequence[int], options: Mapping[str, Any], *, has_bridges: bool = True
    ) -> None:
        """`has_bridges=False`: only calls are read, so an answer may change what came before it."""
        self.tokenizer, self.eos_ids = tokenizer, frozenset(eos_ids)
        self.options = {name: value for name, value in options.items() if name != "tools"}
        self.tools = options.get("tools") or None
        if getattr(tokenizer, "chat_template", None) is None and not options.get("chat_template"):
            raise ModelError(
                "tools need a chat template, which the tokenizer does not have; use an instruct model's, or set "
                "tokenizer.chat_template."
            )
        self._arguments_as_text = False
        self._form = self._learn_form()
        if has_bridges:
            self.bridge([{"role": "tool", "name": _NAME, "content": "qxresult", "tool_call_id": _ID}])

    @property
    def takes_text_arguments(self) -> bool:
        """True where the template adds the arguments of a call to a text, so that they must be one."""
        return self._arguments_as_text

    # -- what the model wrote ---------------------------------------------------------------------------------------

    def calls_in(self, token_ids: Sequence[int]) -> tuple[str, list[WrittenCall]]:
        """Text of a model's turn without its tool calls, and the calls. `token_ids` end with the end-of-turn token, if any."""
        ids = list(token_ids)
        while ids and ids[-1] in self.eos_ids:
            ids.pop()
        if getattr(self.tokenizer, "response_template", None) or getattr(self.tokenizer, "response_schema", None):
            return self._parsed(ids)
        text, calls = self._form(self.tokenizer.decode(ids, skip_special_tokens=False))
        for token in self.tokenizer.all_special_tokens:
            text = text.replace(token, "")
        return text.strip(), calls

    def _parsed(self, ids: list[int]) -> tuple[str, list[WrittenCall]]:
        """By the tokenizer's own response template, where it has one."""
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        try:
            message = self.tokenizer.parse_response(ids)
        except Exception:  # noqa: BLE001 - a call that is no JSON, among others
            return text, []
        calls = [call["function"] for call in message.get("tool_calls") or [] if "function" in call]
        written = [WrittenCall(str(call.get("name", "")), call.get("arguments", {})) for call in calls]
        return str(message.get("content") or ""), written

    # -- what the tools answered ------------------------------------------------------------------------------------

    def bridge(self, answers: Sequence[Message]) -> list[int]:
        """Token ids from the end of the model's turn to the start of its next, with `answers` (tool or user messages).

        Raises ModelError where the template writes what came before the model's turn otherwise once it is answered.
        """
        names = [str(answer.get("name") or _NAME) for answer in answers if answer["role"] == "tool"]
        turn = self._assistant(names, {}) if names else {"role": "assistant", "content": "qx"}
        before = self._render([_ASK], tokenize=True)
        alone = self._render([_ASK, turn], tokenize=True)
        whole = self._render([_ASK, turn, *answers], tokenize=True, add_generation_prompt=True)
        if whole[: len(before)] != before:
            raise ModelError(
                "the tokenizer's chat template is not prefix-stable: an answer changes the tokens that came before the "
                "model's turn, so it would be trained on text that it did not read; set another tokenizer.chat_template."
            )
        end = next((i for i in range(len(before), len(whole)) if whole[i] in self.eos_ids), None)
        if end is not None:
            return list(whole[end + 1 :])
        if whole[: len(alone)] != alone:
            raise ModelError(
                "the tokenizer's chat template has no token that ends the model's turn, and an answer changes that turn; set "
                "another tokenizer.chat_template, or eos_token_id to the token that ends a turn."
            )
        return list(whole[len(alone) :])

    def _render(self, messages: Sequence[Message], *, tokenize: bool, **options: Any) -> Any:
        how = {**self.options, **options}
        if self.tools:
            how["tools"] = self.tools
        if tokenize:
            return chat_ids(self.tokenizer, messages, **how)
        return str(self.tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False, **how))

    def _assistant(self, names: Sequence[str], arguments: Mapping[str, Any]) -> Message:
        """The model's turn with a call of each of these tools."""
        held: Any = json.dumps(arguments) if self._arguments_as_text else dict(arguments)
        call = lambda name: {"type": "function", "id": _ID, "function": {"name": name, "arguments": held}}
        return {"role": "assistant", "content": "", "tool_calls": [call(name) for name in names]}

    # -- the form of a call -----------------------------------------------------------------------------------------

    def _learn_form(self) -> Callable[[str], tuple[str, list[WrittenCall]]]:
        """The parser for calls as this template writes them."""
        body = self._body()
        learnt = [] if body is None else [make(body) for make in (json_form, name_and_json_form, tagged_form)]
        form = next((parser for parser in learnt if parser is not None and _reads_back(parser, body or "")), None)
        has_response_form = getattr(self.tokenizer, "response_template", None) or getattr(
            self.tokenizer, "response_schema", None
        )
        if form is None and not has_response_form:
            raise ModelError(
                "the tokenizer's chat template does not write tool calls, so the model cannot make any; use an instruct model "
                "that was trained with tools, set tokenizer.chat_template, or set tokenizer.response_template."
            )
        return form or (lambda text: (text, []))

    def _body(self) -> str | None:
        """An assistant's turn with one call of two arguments, as the template writes it; None where it leaves them out."""
        arguments = dict(zip(_KEYS, _VALUES, strict=True))
        for self._arguments_as_text in (False, True):  # some templates add the arguments to a text
            try:
                start = self._render([_ASK], tokenize=False, add_generation_prompt=True)
                whole = self._render([_ASK, self._assistant([_NAME], arguments)], tokenize=False)
            except Exception:  # noqa: BLE001 - a template is a program and may raise anything
                continue
            shared = next((i for i, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b), len(start))
            body = whole[shared:]
            if all(word in body for word in (_NAME, *_KEYS, *_VALUES)):
                return self._without_end(body)
        return None

    def _without_end(self, body: str) -> str:
        ends = [self.tokenizer.decode([token]) for token in self.eos_ids]
        cuts = [body.rfind(end) for end in ends if end and end in body]
        return body[: max(cuts)] if cuts else body


def _reads_back(form: Callable[[str], tuple[str, list[WrittenCall]]], body: str) -> bool:
    """True where an inferred form parses the call that it was inferred from."""
    _, calls = form(body)
    return [(call.name, call.arguments) for call in calls] == [(_NAME, dict(zip(_KEYS, _VALUES, strict=True)))]


def json_form(body: str) -> Callable[[str], tuple[str, list[WrittenCall]]] | None:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or a JSON list of such objects behind a word."""
    for start, value, stop in _json_values(body):
        call = value[0] if isinstance(value, list) and value else value
        if not isinstance(call, Mapping) or _NAME not in call.values():
            continue
        name_key = next(key for key, held in call.items() if held == _NAME)
        arguments_key = next((key for key, held in call.items() if _KEYS[0] in str(held)), None)
        if arguments_key is not None:
            return _JsonCalls(last_word(body[:start]), last_word(body[stop:], first=True), name_key, arguments_key)
    return None


def name_and_json_form(body: str) -> Callable[[str], tuple[str, list[WrittenCall]]] | None:
    """`...NAME...{"key": "value"}`, as DeepSeek's and gpt-oss' templates write it."""
    for start, value, _stop in _json_values(body):
        at = body.find(_NAME)
        if isinstance(value, Mapping) and set(value) == set(_KEYS) and 0 <= at < start:
            between = body[at + len(_NAME) : start]
            opener = last_word(body[:at])
            return _NameThenJson(opener, body[:at].strip().removesuffix(opener), last_word(between))
    return None


def tagged_form(body: str) -> Callable[[str], tuple[str, list[WrittenCall]]] | None:
    """Keys and values between tags, as Qwen3-Coder's and GLM's templates write them."""
    places = [body.find(word) for word in (_NAME, _KEYS[0], _VALUES[0], _KEYS[1], _VALUES[1])]
    if -1 in places or places != sorted(places):
        return None
    name, key, value, second, last = places
    middle = body[name + len(_NAME) : key]
    between = body[value + len(_VALUES[0]) : second]
    common = 0
    while common < min(len(middle), len(between)) and middle[-1 - common] == between[-1 - common]:
        common += 1
    opens = middle[len(middle) - common :].split("\n")[-1].split(" ")[-1]
    opens = opens[opens.rfind("<") :] if "<" in opens else opens
    closes = between[: len(between) - len(opens)].strip()
    if not opens or not closes:
        return None
    return _TaggedCalls(
        opener=last_word(body[:name]),
        key_opens=opens,
        key_closes=body[key + len(_KEYS[0]) : value].strip(),
        value_closes=closes,
        closer=last_word(body[last + len(_VALUES[1]) :].strip().removeprefix(closes)),
    )


def last_word(text: str, *, first: bool = False) -> str:
    """The last tag or word before a call (`first`: the first one after it), which marks it. Empty where there is none."""
    text = text.strip()
    if first:
        match = re.match(r"<[^<>]*>|\[[^\[\]]*\]|\S+", text)
        return match.group() if match else ""
    if "<" in text:
        return text[text.rfind("<") :]
    return text.split()[-1] if text else ""


def _json_values(text: str) -> list[tuple[int, Any, int]]:
    """Every JSON object or list in a text, outermost first: start, value, stop."""
    decoder, values, at = json.JSONDecoder(), [], 0
    while at < len(text):
        if text[at] not in "{[":
            at += 1
            continue
        try:
            value, stop = decoder.raw_decode(text, at)
        except ValueError:
            at += 1
            continue
        values.append((at, value, stop))
        at = stop
    return values


def _read_json(text: str, at: int) -> tuple[Any, int, str | None]:
    """The JSON value at or after `at` (spaces skipped), where it ends, and what is wrong with it."""
    while at < len(text) and text[at].isspace():
        at += 1
    try:
        value, stop = json.JSONDecoder().raw_decode(text, at)
    except ValueError as error:
        return None, at, f"the call is no JSON ({error}); write it again"
    return value, stop, None


@dataclass(frozen=True)
class _JsonCalls:
    opener: str
    closer: str
    name_key: str
    arguments_key: str

    def __call__(self, text: str) -> tuple[str, list[WrittenCall]]:
        if not self.opener:
            return self._alone(text)
        parts, calls, at = [], list[WrittenCall](), 0
        while (start := text.find(self.opener, at)) >= 0:
            parts.append(text[at:start])
            value, at, problem = _read_json(text, start + len(self.opener))
            calls += [WrittenCall("", text[at:][:200], problem)] if problem else self._calls(value)
            if problem:
                stop = text.find(self.closer, at) if self.closer else -1
                at = len(text) if stop < 0 else stop
            rest = text[at:]
            if self.closer and rest.lstrip().startswith(self.closer):
                at = len(text) - len(rest.lstrip()) + len(self.closer)
        return "".join([*parts, text[at:]]).strip(), calls

    def _alone(self, text: str) -> tuple[str, list[WrittenCall]]:
        """Without a word before it, a call is a turn that is JSON from its first character on."""
        body = re.sub(r"^\s*<\|python_tag\|>", "", text)
        if not body.lstrip().startswith("{"):
            return text.strip(), []
        value, _, problem = _read_json(body, 0)
        if problem or not (isinstance(value, Mapping) and self.name_key in value):
            return text.strip(), []
        return "", self._calls(value)

    def _calls(self, value: Any) -> list[WrittenCall]:
        calls = []
        for call in value if isinstance(value, list) else [value]:
            if not isinstance(call, Mapping) or not isinstance(call.get(self.name_key), str):
                calls.append(WrittenCall("", value, f"a call is a JSON object with {self.name_key!r}; write it again"))
                continue
            calls.append(WrittenCall(call[self.name_key], _as_mapping(call.get(self.arguments_key, {}))))
        return calls


@dataclass(frozen=True)
class _NameThenJson:
    opener: str
    wrapper: str
    """Text that comes before the opener of the first call."""
    before_json: str

    def __call__(self, text: str) -> tuple[str, list[WrittenCall]]:
        calls, at, first = list[WrittenCall](), 0, len(text)
        name = re.compile(re.escape(self.opener) + r"\s*([\w.\-]+)")
        while match := name.search(text, at):
            first = min(first, match.start())
            start = text.find(self.before_json, match.end()) if self.before_json else match.end()
            value, at, problem = _read_json(text, max(start, match.end()) + len(self.before_json) * (start >= 0))
            at = max(at, match.end())
            calls.append(WrittenCall(match.group(1), value if problem is None else "", problem))
        return text[:first].rstrip().removesuffix(self.wrapper).strip(), calls


@dataclass(frozen=True)
class _TaggedCalls:
    opener: str
    key_opens: str
    key_closes: str
    value_closes: str
    closer: str

    def __call__(self, text: str) -> tuple[str, list[WrittenCall]]:
        calls, first = list[WrittenCall](), len(text)
        name = re.compile(re.escape(self.opener) + r"\s*([\w.\-]+)")
        pair = re.compile(
            re.escape(self.key_opens)
            + r"\s*(.+?)\s*"
            + _flexible(self.key_closes)
            + r"\n?(.*?)\n?"
            + _flexible(self.value_closes),
            re.DOTALL,
        )
        starts = list(name.finditer(text))
        for i, match in enumerate(starts):
            first = min(first, match.start())
            stop = starts[i + 1].start() if i + 1 < len(starts) else len(text)
            end = text.find(self.closer, match.end(), stop) if self.closer else -1
            inside = text[match.end() : stop if end < 0 else end]
            calls.append(WrittenCall(match.group(1), dict(pair.findall(inside))))
        return _before_tag(text[:first]), calls


def _flexible(literal: str) -> str:
    """A pattern for a literal whose white space may differ."""
    return r"\s*".join(re.escape(part) for part in literal.split())


def _before_tag(text: str) -> str:
    """A turn's text without the wrapper tag that opens a call."""
    return re.sub(r"<[^<>/]*>\s*$", "", text).strip()


def _as_mapping(arguments: Any) -> Any:
    """Arguments that are JSON in a text, as some models write them, read."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def typed_argument(value: Any, schema: Mapping[str, Any] | None) -> Any:
    """Text as the JSON value that the schema asks for; anything else as it is."""
    if not isinstance(value, str) or schema is None or schema.get("type", "string") == "string":
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
