"""Forms of tool calls, inferred from a turn with one call of known words as a chat template writes it."""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from covey.data.rendering import rewritten
from covey.data.thoughts import last_word
from covey.files.bounded import MOST_DEPTH, json_depth, whole_characters

NAME, KEYS, VALUES = "qxname", ("qxkeya", "qxkeyb"), ("qxvaluea", "qxvalueb")
ID = "qxcall001"
"""Nine letters and digits, which Mistral's templates insist on."""


@dataclass(frozen=True)
class WrittenCall:
    """A tool call as the model wrote it. `problem` says why it could not be read, else None."""

    name: str
    arguments: Any
    problem: str | None = None
    id: str | None = None
    """Identity that the model wrote with the call, if its form has one."""


def reads_back(form: Callable[[str], tuple[str, list[WrittenCall]]], body: str) -> bool:
    """True where an inferred form parses the call that it was inferred from."""
    _, calls = form(body)
    return [(call.name, call.arguments) for call in calls] == [(NAME, dict(zip(KEYS, VALUES, strict=True)))]


def json_form(body: str) -> Callable[[str], tuple[str, list[WrittenCall]]] | None:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or a JSON list of such objects behind a word."""
    for start, value, stop in _json_values(body):
        call = value[0] if isinstance(value, list) and value else value
        if not isinstance(call, Mapping) or NAME not in call.values():
            continue
        name_key = next(key for key, held in call.items() if held == NAME)
        arguments_key = next((key for key, held in call.items() if KEYS[0] in str(held)), None)
        id_key = next((key for key, held in call.items() if held == ID), None)
        if arguments_key is not None:
            closer = last_word(body[stop:], first=True)
            return _JsonCalls(last_word(body[:start]), closer, name_key, arguments_key, id_key)
    return None


def name_and_json_form(body: str) -> Callable[[str], tuple[str, list[WrittenCall]]] | None:
    """`...NAME...{"key": "value"}`, as DeepSeek's and gpt-oss' templates write it."""
    for start, value, _stop in _json_values(body):
        at = body.find(NAME)
        if isinstance(value, Mapping) and set(value) == set(KEYS) and 0 <= at < start:
            between = body[at + len(NAME) : start]
            opener = last_word(body[:at])
            if not opener:
                return None  # any word would be a tool's name
            id_opens = last_word(between[: between.find(ID)]) if ID in between else None
            return _NameThenJson(opener, last_word(between.replace(ID, " ")), id_opens)
    return None


def recipient_form(body: str) -> Callable[[str], tuple[str, list[WrittenCall]]] | None:
    """`>>>NAME\n{"key": "value"}`, as Functionary's templates write it. Those whose prompts end with `>>>` write it before all but the first."""
    mark = re.match(rf"\s*(>>>)?{NAME}\n{{", body)
    begin = ">>>" if mark and mark[1] else r"(?:>>>|\A\s*)"
    return partial(_read_recipients, re.compile(begin + r"([\w.\-]+)\n")) if mark else None


def tagged_form(body: str) -> Callable[[str], tuple[str, list[WrittenCall]]] | None:
    """Keys and values between tags, as Qwen3-Coder's and GLM's templates write them."""
    places = [body.find(word) for word in (KEYS[0], VALUES[0], KEYS[1], VALUES[1])]
    places = [body.rfind(NAME, 0, max(places[0], 0)), *places]  # a channel may name the tool before
    if -1 in places or places != sorted(places):
        return None
    name, key, value, second, last = places
    middle = body[name + len(NAME) : key]
    between = body[value + len(VALUES[0]) : second]
    common = 0
    while common < min(len(middle), len(between)) and middle[-1 - common] == between[-1 - common]:
        common += 1
    opens = middle[len(middle) - common :]
    opens = opens[opens.rfind("<") :] if "<" in opens else opens.split("\n")[-1].split(" ")[-1]
    closes = between[: len(between) - len(opens)].strip()
    if not opens or not closes:
        return None
    key_closes = body[key + len(KEYS[0]) : value]
    around = key_closes[len(key_closes.rstrip()) :]
    around = around if between.startswith(around) else ""
    key_closes = key_closes.strip()
    closer = last_word(body[last + len(VALUES[1]) :].strip().removeprefix(closes), first=True)
    return _TaggedCalls(last_word(body[:name]), opens, key_closes, closes, closer, around)


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


def read_json(text: str, at: int) -> tuple[Any, int, str | None]:
    """The JSON value at or after `at` (spaces skipped), where it ends, and what is wrong with it."""
    while at < len(text) and text[at].isspace():
        at += 1
    try:
        value, stop = json.JSONDecoder().raw_decode(text, at)
        return writable(value), stop, None
    except (ValueError, RecursionError) as error:
        return None, at, f"the call is no JSON ({error}); write it again"


def readable(value: Any) -> Any:
    """The value with U+FFFD for half of a pair of surrogates, as an escape of JSON may leave, which no tokenizer or file takes."""
    return rewritten(value, whole_characters)


def writable(value: Any) -> Any:
    """`readable` of a value of Python that JSON can hold. Raises RecursionError for one nested too deep, TypeError for keys that are no texts."""
    if json_depth(json.dumps(value, sort_keys=True, default=str).encode()) > MOST_DEPTH:
        raise RecursionError(f"nested more than {MOST_DEPTH} deep")
    return readable(value)


@dataclass(frozen=True)
class _JsonCalls:
    opener: str
    closer: str
    name_key: str
    arguments_key: str
    id_key: str | None

    def __call__(self, text: str) -> tuple[str, list[WrittenCall]]:
        if not self.opener:
            return self._alone(text)
        parts, calls, at = [], list[WrittenCall](), 0
        while (start := text.find(self.opener, at)) >= 0:
            parts.append(text[at:start])
            value, at, problem = read_json(text, start + len(self.opener))
            calls += [WrittenCall("", text[at:][:200], problem)] if problem else self._calls(value)
            while problem is None and text[at:].lstrip().startswith("{"):  # MiniMax M1: several behind one opener
                value, stop, wrong = read_json(text, at)
                is_call = isinstance(value, Mapping) and self.name_key in value
                if not is_call and (wrong is None or not self.closer):
                    break
                calls += self._calls(value) if is_call else [WrittenCall("", text[stop:][:200], wrong)]
                at, problem = stop, wrong
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
        value, _, problem = read_json(body, 0)
        if problem or not (isinstance(value, Mapping) and self.name_key in value):
            return text.strip(), []
        return "", self._calls(value)

    def _calls(self, value: Any) -> list[WrittenCall]:
        calls = []
        for call in value if isinstance(value, list) else [value]:
            if not isinstance(call, Mapping) or not isinstance(call.get(self.name_key), str):
                calls.append(WrittenCall("", value, f"a call is a JSON object with {self.name_key!r}; write it again"))
                continue
            call_id = call.get(self.id_key) if self.id_key else None
            arguments = as_mapping(call.get(self.arguments_key, {}))
            calls.append(WrittenCall(call[self.name_key], arguments, id=call_id if isinstance(call_id, str) else None))
        return calls


@dataclass(frozen=True)
class _NameThenJson:
    opener: str
    before_json: str
    id_opens: str | None
    """Text between the name and the call's identity; None where the form writes none of its own."""

    def __call__(self, text: str) -> tuple[str, list[WrittenCall]]:
        calls, at, first = list[WrittenCall](), 0, len(text)
        has_name_in_id = self.opener.endswith("functions.")  # Kimi's identity: functions.NAME:0
        name = re.compile(re.escape(self.opener) + r"\s*([\w.\-]+)(:\d+)?")
        while match := name.search(text, at):
            first = min(first, match.start())
            start = text.find(self.before_json, match.end()) if self.before_json else match.end()
            value, at, problem = read_json(text, max(start, match.end()) + len(self.before_json) * (start >= 0))
            at = max(at, match.end())
            call_id = f"functions.{match.group(1)}{match.group(2)}" if has_name_in_id and match.group(2) else None
            if self.id_opens is not None:
                identity = re.match(re.escape(self.id_opens) + r"\s*([\w.:\-]+)", text[match.end() :].lstrip())
                call_id = identity.group(1) if identity else None
            calls.append(WrittenCall(match.group(1), value if problem is None else "", problem, call_id))
        return text[:first].strip(), calls


def _read_recipients(begin: re.Pattern[str], text: str) -> tuple[str, list[WrittenCall]]:
    """The part of a turn for the recipient `all` is its text, JSON for any other a call.

    A first line without `>>>` names a recipient where `all` or an opening brace shows that it does: it may be an answer's.
    """
    marked = lambda head: text[head.start()] == ">" or head[1] == "all" or text[head.end() :].lstrip().startswith("{")
    heads = [head for head in begin.finditer(text) if marked(head)]
    places = [*(head.start() for head in heads), len(text)]
    shown, calls = text[: places[0]], list[WrittenCall]()
    for head, stop in zip(heads, places[1:], strict=True):
        value, _, problem = read_json(text, head.end())
        if head[1] == "all":
            shown += text[head.end() : stop]
        else:
            calls.append(WrittenCall(head[1], value if problem is None else "", problem))
    return shown.strip(), calls


@dataclass(frozen=True)
class _TaggedCalls:
    opener: str
    key_opens: str
    key_closes: str
    value_closes: str
    closer: str
    around: str
    """White space that the form adds to both ends of a value."""

    def __call__(self, text: str) -> tuple[str, list[WrittenCall]]:
        calls, first, at = list[WrittenCall](), len(text), 0
        name = re.compile(re.escape(self.opener) + r"\s*([\w.\-]+)")
        while match := name.search(text, at):
            first = min(first, match.start())
            arguments, at = self._pairs(text, match.end())
            calls.append(WrittenCall(match.group(1), arguments))
        return re.sub(r"<[^<>/]*>\s*$", "", text[:first]).strip(), calls  # without a tag around the calls

    def _pairs(self, text: str, at: int) -> tuple[dict[str, str], int]:
        """Arguments from `at` on, and where they end. A mark of a part of calls is text where the value goes on behind it."""
        spaces = rf"(?:{re.escape(self.around)})?"
        head = re.compile(re.escape(self.key_opens) + r"\s*(.+?)\s*" + _flexible(self.key_closes) + spaces)
        closes = spaces + _flexible(self.value_closes)
        marks = [re.escape(mark) for mark in (self.key_opens, self.closer, self.opener) if mark]
        ends = (re.compile(closes + rf"(?=\s*(?:{'|'.join(marks)}|$))"), re.compile(closes))
        over = re.compile("|".join(marks[1:]))
        pairs = dict[str, str]()
        while match := head.search(text, at):
            stop = over.search(text, at, match.end())
            end = next((end for pattern in ends if (end := pattern.search(text, match.end()))), None)
            if end is None or (stop is not None and stop.start() < match.start()):
                break
            pairs[match.group(1)], at = text[match.end() : end.start()], end.end()
        return pairs, at


_ATTRIBUTES = r'(?:\s+[\w\-]+="[^"]*")'


def _flexible(text: str) -> str:
    """A pattern for a literal whose white space may differ; behind a key that is an attribute of a tag, other attributes may."""
    if text.startswith('"'):
        return f'"{_ATTRIBUTES}*' + _flexible(re.sub(_ATTRIBUTES, "", text[1:]))
    return r"\s*".join(re.escape(part) for part in text.split())


def as_mapping(arguments: Any) -> Any:
    """Arguments that are JSON in a text, as some models write them, read."""
    if not isinstance(arguments, str):
        return arguments
    value, stop, problem = read_json(arguments, 0)
    return arguments if problem or arguments[stop:].strip() else value


def typed_call(call: WrittenCall, schemas: Mapping[str, Any]) -> WrittenCall:
    """The call with arguments that a template writes as text converted to the types of their `schemas`."""
    if not isinstance(call.arguments, Mapping):
        return call
    typed = {name: typed_argument(value, schemas.get(name)) for name, value in call.arguments.items()}
    return replace(call, arguments=typed)


def typed_argument(value: Any, schema: Mapping[str, Any] | None) -> Any:
    """Text as a JSON value of a type that the schema admits besides text; anything else as it is."""
    if not isinstance(value, str) or not isinstance(schema, Mapping) or value in _listed(schema, "enum"):
        return value
    kinds, read = _kinds(schema), literal(value)
    is_admitted = any(type(read) in _TYPES.get(kind, ()) for kind in kinds)
    return read if is_admitted or (kinds and "string" not in kinds) else value


_TYPES = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def _kinds(schema: Any) -> set[str]:
    """JSON's types that a schema admits, of its alternatives and listed values too; empty where it says none."""
    if not isinstance(schema, Mapping):
        return set()
    names, kinds = schema.get("type"), set[str]()
    kinds |= {
        name for name in ([names] if isinstance(names, str) else _listed(schema, "type")) if isinstance(name, str)
    }
    for key in ("anyOf", "oneOf", "allOf"):
        kinds |= {kind for part in _listed(schema, key) for kind in _kinds(part)}
    values = _listed(schema, "enum") or ([schema["const"]] if "const" in schema else ())
    if not kinds:
        kinds = {kind for kind, types in _TYPES.items() for value in values if type(value) in types}
        kinds |= {"string"} if any(isinstance(value, str) for value in values) else set()
    return kinds


def _listed(schema: Mapping[str, Any], key: str) -> Sequence[Any]:
    """The list under a key of a schema; empty where there is none."""
    values = schema.get(key)
    return values if isinstance(values, list | tuple) else ()


def literal(text: str) -> Any:
    """The value of JSON or of a literal of Python, as some templates write `True` and `None`; any other text as it is."""
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return writable(read(text))
    return text
