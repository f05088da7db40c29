"""Token ids of a conversation, in which only the chat template writes control tokens."""

import copy
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from covey.errors import DataError, message_of

logger = logging.getLogger(__name__)

THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message that hold thoughts, by the servers and templates of today."""
_OPENS, _CLOSES = "\uf8f0", "\uf8f1"
_PLACES = ("image_token", "boi_token", "audio_token", "video_token")
_HIDDEN = re.compile(f"{_OPENS}([0-9]+){_CLOSES}")


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    """[L] ids of `apply_chat_template(messages, **options)`; control tokens in messages, tools or options stay text.

    A user who writes `<|im_end|>` writes these characters, and not the token that ends a turn. Conversations without such
    text are tokenized in one piece, as transformers does; others piece by piece around it.
    """
    messages = as_template_takes(tokenizer, messages, options)
    marks = control_texts(tokenizer)
    shown = {name: value for name, value in options.items() if name != "chat_template"}
    if not _holds([list(messages), shown], marks):
        encoded = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
        return list(encoded["input_ids"])
    hidden, shown = _hidden([list(messages), shown], marks)
    template = {"chat_template": options["chat_template"]} if "chat_template" in options else {}
    rendered = tokenizer.apply_chat_template(hidden, tokenize=False, **template, **shown)
    return _ids_of_hidden(tokenizer, rendered, marks)


def next_turn(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Options of `apply_chat_template` for the model's turn behind a conversation; one that ends with the assistant is continued."""
    return {"continue_final_message" if messages[-1]["role"] == "assistant" else "add_generation_prompt": True}


@contextmanager
def refusals(where: str, program: str, noun: str) -> Iterator[None]:
    """Context in which any exception is a DataError: a chat template and a processor are programs, which may raise anything."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {message_of(error, 300)}"
        raise DataError(f"{where}: the {program} refused its {noun} ({reason}).") from error


def clean(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without its fields, nor those of its parts and calls, that are null; `content` stays.

    Objects that are arguments of calls or answers of tools keep their nulls, which are values.
    """
    cleaned: dict[str, Any] = _without_fields(message)
    return cleaned


_DATA = ("arguments", "content")
"""Fields whose objects hold data."""


def _without_fields(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: part if isinstance(part, Mapping) and name in _DATA else _without_fields(part)
            for name, part in value.items()
            if part is not None or _is_content(name, value)
        }
    return [_without_fields(part) for part in value] if isinstance(value, list | tuple) else value


def _is_content(name: str, message: Mapping[str, Any]) -> bool:
    return name == "content" and "role" in message


_ANY: Any = object()
"""Feature of values that may be structs, at any depth."""
ROW_COLUMNS = ("prompt", "completion", "chat_template_kwargs")
_CHAT_COLUMNS = (*ROW_COLUMNS, "messages", "conversations", "conversation", "tools")


def as_written(
    row: Mapping[str, Any], features: Mapping[str, Any] | None, columns: Collection[str] = _CHAT_COLUMNS
) -> dict[str, Any]:
    """The row, its messages, tools and options without the nulls that Arrow filled in: a struct has the keys of all rows.

    `features`: those of the data set. JSON text has the nulls that were written, and they stay. None, of a stream that does not say how
    its rows are stored: every null goes.
    """
    stored = lambda name: _ANY if features is None else features.get(name)
    return {name: _unfilled(value, stored(name)) if name in columns else value for name, value in row.items()}


def _unfilled(value: Any, feature: Any) -> Any:
    if isinstance(value, Mapping) and (feature is _ANY or isinstance(feature, Mapping)):
        inner = lambda name: _ANY if feature is _ANY else feature.get(name)
        return {
            name: _unfilled(part, inner(name))
            for name, part in value.items()
            if part is not None or _is_content(name, value)
        }
    if isinstance(value, list | tuple):
        items = (
            _ANY if feature is _ANY else feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        )
        return [_unfilled(part, items) for part in value]
    return value


def _changed(message: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The message with the arguments of its tool calls changed."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_arguments(call, change) for call in calls]} if calls else dict(message)


def _with_arguments(call: Any, change: Callable[[Any], Any]) -> Any:
    """The call of a message with its arguments changed, with or without `function` around them; other forms of calls as they are."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"], change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_json(arguments: Any) -> Any:
    is_written = arguments is None or isinstance(arguments, str)
    return arguments if is_written else json.dumps(arguments, ensure_ascii=False)


def _objects_in(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Arguments of tool calls that are objects and not empty."""
    calls = [call for message in messages for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    functions = [call["function"] if isinstance(call.get("function"), Mapping) else call for call in calls]
    arguments = [function.get("arguments") for function in functions]
    return [entry for entry in arguments if isinstance(entry, Mapping) and entry]


def as_template_takes(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The messages with arguments of tool calls as objects, also those that are JSON in a text.

    As JSON again where the template adds them to a text: where it raises for objects, or writes them as Python does. An object that
    is the content of an answer stays one where the template writes JSON of it, and is JSON too where it does not.
    """
    plain = [dict(message) for message in messages]
    contents = [content for message in plain if isinstance(content := message.get("content"), Mapping)]
    as_text = [with_text(message) for message in plain] if contents else plain
    arguments = _arguments_taken(tokenizer, as_text, options)
    shown = [_changed(message, arguments) for message in as_text]
    if not contents:
        return shown
    objects = [_changed(message, arguments) for message in plain]
    rendered = _rendered(tokenizer, objects, options)
    if rendered is not None and all(_as_json(content) in rendered for content in contents):
        return objects
    say_once(
        "The content of a tool's answer is an object, which the chat template does not write as JSON; it is given the JSON as a text. TRL gives "
        "it the object, of which such templates show Python's repr, the keys, or nothing."
    )
    return shown


@lru_cache(maxsize=256)
def say_once(sentence: str) -> None:
    """Log a sentence as a warning, the first time."""
    logger.warning(sentence)


def _arguments_taken(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> Callable[[Any], Any]:
    """The change of the arguments of calls to what the template takes: objects, or JSON."""
    if not any(message.get("tool_calls") for message in messages):
        return lambda arguments: arguments
    objects = [_changed(message, _as_object) for message in messages]
    rendered = _rendered(tokenizer, objects, options)
    takes = rendered is not None and not any(str(arguments) in rendered for arguments in _objects_in(objects))
    return _as_object if takes else lambda arguments: _as_json(_as_object(arguments))


def with_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with content that is an object as JSON."""
    content = message.get("content")
    return {**message, "content": _as_json(content)} if isinstance(content, Mapping) else dict(message)


def for_endpoint(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as OpenAI's API takes it: content and arguments of calls that are objects as JSON."""
    return _changed(with_text(message), _as_json)


def content_text(content: Any) -> str:
    """The text of a message's content: itself, that of its parts, the JSON of an object or a list of others; empty for None."""
    if content is None or isinstance(content, str):
        return content or ""
    is_part = lambda part: isinstance(part, str) or (isinstance(part, Mapping) and bool({"type", "text"} & {*part}))
    if isinstance(content, list | tuple) and all(map(is_part, content)):
        return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)
    return str(_as_json(content))


def prompt_text(prompt: Any) -> str:
    """The text of a prompt; for a conversation the contents of its messages, joined."""
    if isinstance(prompt, str):
        return prompt
    messages = prompt if isinstance(prompt, list | tuple) else ()
    return "\n".join(content_text(message.get("content")) for message in messages if isinstance(message, Mapping))


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str | None:
    """The text of the messages; None where the template refuses them."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception:  # noqa: BLE001 - a template is a program and may raise anything
        return None


def keeping_text(processor: Any, messages: Sequence[Mapping[str, Any]]) -> tuple[Any, Sequence[Mapping[str, Any]]]:
    """Processor and messages as they are to be rendered and read, so that control tokens in messages stay text.

    Both are as before where no message spells a control token out. The placeholder of an image, a sound or a video is none of
    them: how often it stands in a text is checked against the number of items.
    """
    places = {getattr(owner, name, None) for owner in (processor, processor.tokenizer) for name in _PLACES}
    marks = [mark for mark in control_texts(processor.tokenizer) if mark not in places]
    if not _holds(messages, marks):
        return processor, messages
    reader = copy.copy(processor)
    reader.tokenizer = HiddenMarks(processor.tokenizer, marks)
    return reader, _hidden(messages, marks)


class HiddenMarks:
    """A tokenizer that reads texts of `_hidden`; everything else is the real tokenizer's."""

    def __init__(self, tokenizer: Any, marks: Sequence[str]) -> None:
        self._real, self._marks = tokenizer, marks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __call__(self, text: Any, *, add_special_tokens: bool = True, return_tensors: Any = None, **_: Any) -> Any:
        from transformers import BatchEncoding

        texts = [text] if isinstance(text, str) else text
        first = self._real("", add_special_tokens=add_special_tokens)["input_ids"]
        rows = [[*first, *_ids_of_hidden(self._real, each, self._marks)] for each in texts]
        encoded = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
        if isinstance(text, str) and return_tensors is None:
            encoded = {name: values[0] for name, values in encoded.items()}
        return BatchEncoding(encoded, tensor_type=return_tensors)


def _hidden(value: Any, marks: Sequence[str]) -> Any:
    """The value with a place holder for every control token in its texts."""
    pattern = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
    places = {mark: f"{_OPENS}{i}{_CLOSES}" for i, mark in enumerate(marks)}
    return rewritten(value, lambda text: pattern.sub(lambda match: places[match[0]], text))


def _ids_of_hidden(tokenizer: Any, text: str, marks: Sequence[str]) -> list[int]:
    """Ids of a rendered text of `_hidden`: control tokens around the place holders, and their plain text in them."""
    ids: list[int] = []
    for i, piece in enumerate(_HIDDEN.split(text)):
        is_mark = i % 2 == 1 and int(piece) < len(marks)
        ids += plain_ids(tokenizer, marks[int(piece)]) if is_mark else _ids(tokenizer, piece)
    return ids


def control_texts(tokenizer: Any) -> list[str]:
    """The texts of a tokenizer's control tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    added = {} if callable(added) else added  # mistral-common's tokenizers have none
    texts = {
        *getattr(tokenizer, "all_special_tokens", ()),
        *(str(token) for token in added.values() if getattr(token, "special", False)),
    }
    return sorted(text for text in texts if text.strip())


def spells_control(tokenizer: Any, *texts: str) -> bool:
    """True if one of the texts spells out a control token."""
    return _holds(texts, control_texts(tokenizer))


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text in which no control token is read: the text in ever smaller parts."""
    ids = _ids(tokenizer, text)
    if len(text) < 2 or not set(ids) & set(control_ids(tokenizer)):
        return ids
    half = 1 if len(text) < 4 else len(text) // 2
    return plain_ids(tokenizer, text[:half]) + plain_ids(tokenizer, text[half:])


def control_ids(tokenizer: Any) -> list[int]:
    """Ids of a tokenizer's control tokens."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    return [id for id in tokenizer.convert_tokens_to_ids(control_texts(tokenizer)) if id != unknown]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _holds(value: Any, marks: Sequence[str]) -> bool:
    if isinstance(value, str):
        return any(mark in value for mark in marks)
    if isinstance(value, Mapping):
        return any(_holds(part, marks) for pair in value.items() for part in pair)
    return isinstance(value, list | tuple) and any(_holds(part, marks) for part in value)


def rewritten(value: Any, rewrite: Callable[[str], str]) -> Any:
    """The value with every text in it rewritten, keys included; lists and tuples stay what they are."""
    if isinstance(value, str):
        return rewrite(value)
    if isinstance(value, Mapping):
        return {rewritten(name, rewrite): rewritten(part, rewrite) for name, part in value.items()}
    parts = [rewritten(part, rewrite) for part in value] if isinstance(value, list | tuple) else value
    return tuple(parts) if isinstance(value, tuple) else parts
