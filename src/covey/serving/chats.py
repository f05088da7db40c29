"""The messages and tools of a chat request, through the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from covey.data import chat_ids
from covey.data.rendering import THOUGHT_FIELDS
from covey.data.thoughts import ThoughtMarks, without_refused_thoughts
from covey.environments import Template
from covey.environments.messages import has_form
from covey.errors import DataError, ModelError
from covey.serving.content import MediaReader, content_of
from covey.serving.errors import bad
from covey.serving.fields import Fields
from covey.serving.turns import TurnReader
from covey.types import Prompt

_OF_THE_CALL = frozenset({
    "conversation", "messages", "chat_template", "add_generation_prompt", "tokenize", "sanitize_control_tokens", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip
"""Arguments of `apply_chat_template` itself, such as `max_length`, which would cut the prompt."""


def messages_in(fields: Fields, field: str | None, reads_media: bool = False) -> list[dict[str, Any]]:
    """The messages, with their thoughts in the field that the template reads, if it reads one. Raises APIError."""
    messages = fields.take("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("messages must be a list of at least one message.", "messages")
    return [_message(message, f"messages[{i}]", field, reads_media) for i, message in enumerate(messages)]


def _message(raw: Any, place: str, field: str | None, reads_media: bool) -> dict[str, Any]:
    """With its content as one text, or parts where it has images or sounds, and the arguments of its tool calls as objects, which chat templates expect."""
    if not isinstance(raw, dict) or not isinstance(raw.get("role"), str):
        raise bad(f"{place} must be an object with a role.", place)
    message = {name: value for name, value in raw.items() if value is not None}
    content = raw.get("content")
    if isinstance(content, list):
        content = content_of(content, f"{place}.content", reads_media)
    if content is not None and not isinstance(content, str | list):
        raise bad(f"{place}.content must be a text, or a list of text parts.", place)
    message["content"] = content or ""
    thoughts = [message.pop(name) for name in THOUGHT_FIELDS if name in message]
    if not all(isinstance(text, str) for text in thoughts):
        raise bad(f"{place} has thoughts (reasoning_content) that are no text.", place)
    if field is not None and any(thoughts):
        message[field] = next(filter(None, thoughts))
    if content is None and not raw.get("tool_calls") and not any(thoughts):
        raise bad(f"{place} has no content.", place)
    if "tool_calls" in message:
        if not isinstance(raw["tool_calls"], list):
            raise bad(f"{place}.tool_calls must be a list.", place)
        message["tool_calls"] = [_tool_call(call, f"{place}.tool_calls") for call in raw["tool_calls"]]
    return message


def _tool_call(raw: Any, place: str) -> dict[str, Any]:
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad(f"{place} must hold objects with a function and its name.", place)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise bad(f"{place} has arguments that are no JSON ({error}).", place) from error
    return {**raw, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def tools_in(fields: Fields, options: dict[str, Any]) -> list[dict[str, Any]]:
    """The tools that the model is shown, also those among the template's options; [] with tool_choice "none"."""
    tools, others, choice = fields.take("tools", []), options.pop("tools", []), fields.take("tool_choice", "auto")
    if tools and others and tools != others:
        raise bad("tools and the tools in chat_template_kwargs differ; give them in one place.", "tools")
    tools = others if tools == [] else tools
    if not isinstance(tools, list) or not all(map(_is_tool, tools)):
        raise bad(
            "tools must be a list of objects with a function, its name, and its parameters as an object.", "tools"
        )
    if choice not in ("auto", "none"):
        sentence = 'tool_choice must be "auto" or "none": a model cannot be forced to call a tool here.'
        raise bad(sentence, "tool_choice", "unsupported_parameter")
    return [] if choice == "none" else tools


def _is_tool(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    parameters = function.get("parameters") or {}
    return isinstance(parameters, dict) and isinstance(parameters.get("properties") or {}, dict)


def reader_of(
    tokenizer: Any,
    eos_ids: Sequence[int],
    options: Mapping[str, Any],
    render: Callable[..., list[int]],
    marks: ThoughtMarks | None,
    *,
    separates: bool,
) -> TurnReader:
    """Reader of the answers to a request with these options, tools among them. Raises APIError where the template takes no tools."""
    try:
        template = Template(tokenizer, eos_ids, options, has_bridges=False) if options.get("tools") else None
    except ModelError as error:
        raise bad(f"No tools with this model: {error}", "tools", "unsupported_parameter") from error
    return TurnReader(
        tokenizer=tokenizer,
        render=render,
        template=template,
        marks=marks if separates and not has_form(tokenizer) else None,
        has_form=separates and has_form(tokenizer),
        options=options,
    )


def chat_prompt(
    tokenizer: Any, messages: list[dict[str, Any]], options: Mapping[str, Any], add_prompt: bool, items: dict[str, Any]
) -> Prompt:
    """The conversation through the chat template. Raises APIError where it refuses the messages.

    `tokenizer`: or a MediaReader, which adds the images, sounds and videos to `items` by their digests.
    """
    if held := sorted(_OF_THE_CALL.intersection(options)):
        raise bad(f"chat_template_kwargs may not hold {held[0]}.", "chat_template_kwargs")
    columns = {"tools": options["tools"]} if options.get("tools") else {}
    if isinstance(tokenizer, MediaReader):
        try:
            return replace(tokenizer.prompt(messages, options, add_prompt, items), columns=columns)
        except DataError as error:
            raise bad(str(error), "messages") from error
    try:
        ids = rendered(tokenizer, messages, options, add_prompt)
    except Exception as error:
        raise bad(f"The model's chat template refuses these messages: {error}", "messages") from error
    return Prompt(uid="0", messages=tuple(messages), token_ids=tuple(ids), columns=columns)


def rendered(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], add_prompt: bool
) -> list[int]:
    """Token ids of messages."""
    read = lambda shown: chat_ids(tokenizer, shown, add_generation_prompt=add_prompt, **options)
    return without_refused_thoughts(read, messages, Exception)
