"""Messages of the model's turns: what users read, and thoughts and tool calls apart, where tokenizer or template tell them apart."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from covey.data.rendering import THOUGHT_FIELDS, content_text
from covey.data.thoughts import message_thoughts, thought_marks
from covey.environments.call_forms import WrittenCall, read_json
from covey.types import Completion, Group, Message, Prompt

_CHANNEL_MESSAGE = re.compile(
    r"(?P<header>(?:(?!<\|message\|>|<\|end\|>).)*)<\|message\|>(?P<content>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|$)",
    re.DOTALL,
)


def with_messages(group: Group, tokenizer: Any) -> Group:
    """The group as TRL's rewards read it: completions of a chat as `messages`, by the tokenizer's `response_template` or harmony's channels.

    Unchanged where the prompt is no chat, or the whole text is the content.
    """
    prompt = group.prompt
    if prompt.messages is None or not has_form(tokenizer):
        return group
    read = lambda done: replace(done, messages=(_message(done, prompt, tokenizer),)) if done.messages is None else done
    return replace(group, completions=tuple(read(completion) for completion in group.completions))


def _message(done: Completion, prompt: Prompt, tokenizer: Any) -> Message:
    parsed = message_in(tokenizer, done.token_ids.tolist(), prompt.token_ids, prompt.columns.get("tools"))
    return {"role": "assistant", "content": done.text} if parsed is None else parsed


def has_form(tokenizer: Any) -> bool:
    """True if a tokenizer's turns are read by its `response_template` or by harmony's channels."""
    template = getattr(tokenizer, "chat_template", None)
    has_channels = isinstance(template, str) and "<|channel|>analysis<|message|>" in template
    return bool(getattr(tokenizer, "response_template", None)) or has_channels


def message_in(tokenizer: Any, ids: Sequence[int], prefix: Sequence[int], tools: Any) -> dict[str, Any] | None:
    """The message of a turn where `has_form`; None where the turn does not follow its response template."""
    if getattr(tokenizer, "response_template", None):
        return parsed_response(tokenizer, ids, prefix, tools)
    text = tokenizer.decode(list(ids), skip_special_tokens=False)
    shown, _ = read_channels(text)
    return {"role": "assistant", "content": without_specials(shown, tokenizer), **thoughts_in(text)}


def with_thoughts_apart(tokenizer: Any, ids: Sequence[int], prefix: Sequence[int]) -> tuple[str, str] | None:
    """Thoughts and text of a turn behind the ids `prefix`; None where no thoughts are told apart in it."""
    if has_form(tokenizer):
        message = message_in(tokenizer, ids, prefix, None)
        return None if message is None else (message_thoughts(message), message["content"])
    if (marks := thought_marks(tokenizer)) is None:
        return None
    shown = {*tokenizer.convert_tokens_to_ids([marks.opens, marks.closes])}
    hidden = {*tokenizer.all_special_ids} - shown
    text = tokenizer.decode([token for token in ids if token not in hidden], skip_special_tokens=False)
    thoughts, text = marks.split(text, marks.are_open(tokenizer, prefix))
    return (thoughts, text) if thoughts else None


def without_specials(text: str, tokenizer: Any, strips: bool = True) -> str:
    """The text without special tokens."""
    for token in tokenizer.all_special_tokens:
        text = text.replace(token, "")
    return text.strip() if strips else text


# -- a tokenizer's response template --------------------------------------------------------------------------------


def parsed_response(
    tokenizer: Any, turn: str | Sequence[int], prefix: str | Sequence[int], tools: Any
) -> dict[str, Any] | None:
    """The message of a turn, text or token ids, by the tokenizer's `response_template`; None where the turn does not follow it.

    `prefix`: the prompt before the turn, which may have opened its thoughts.
    """
    as_input = lambda part: part if isinstance(part, str) else list(part)
    try:
        message = tokenizer.parse_response(as_input(turn), prefix=as_input(prefix), tools=tools)
    except (ValueError, TypeError, RecursionError):  # a call that is no JSON, or nested too deep, among others
        return None
    return {**message, "content": content_text(message.get("content"))} if isinstance(message, Mapping) else None


def thoughts_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a message that hold thoughts."""
    return {name: message[name] for name in THOUGHT_FIELDS if message.get(name)}


# -- channels: gpt-oss' harmony -------------------------------------------------------------------------------------


def read_channels(text: str) -> tuple[str, list[WrittenCall]]:
    """The text for users, which is all but the channel `analysis`, and the calls: messages to `functions.NAME`."""
    if "<|message|>" not in text:
        return text.split("<|channel|>")[0].strip(), []  # no channel at all, or one whose name was cut
    shown, calls = [], list[WrittenCall]()
    for header, channel, content in _channels(text):
        recipient = re.search(r"to=functions\.([\w.\-]+)", header)
        loose = re.sub(r"<\|start\|>\s*\w*", "", header).split("<|")[0]  # words outside of any channel
        shown.append(re.sub(r"to=\S+", "", loose).strip())
        if recipient is not None:
            value, _, problem = read_json(content, 0)
            calls.append(WrittenCall(recipient.group(1), value if problem is None else "", problem))
        elif channel != "analysis":
            shown.append(content.strip())
    return "\n".join(filter(None, shown)), calls


def thoughts_in(text: str) -> dict[str, str]:
    """The channel `analysis` as the field `thinking`, by which gpt-oss' template names it; empty where nothing was thought."""
    thoughts = [content.strip() for _, channel, content in _channels(text) if channel == "analysis"]
    return {"thinking": "\n".join(thoughts)} if thoughts else {}


def _channels(text: str) -> Iterator[tuple[str, str | None, str]]:
    """Header, channel and content of each message."""
    for message in _CHANNEL_MESSAGE.finditer(text):
        channel = re.search(r"<\|channel\|>\s*(\w+)", message["header"])
        yield message["header"], channel.group(1) if channel else None, message["content"]
