"""One row of a data set to a `Prompt`: checked, rendered, encoded as TRL 1.16 encodes it."""

from collections.abc import Mapping, Sequence
from typing import Any

from covey.data.media import media_prompt, refuse_openai_parts, row_kinds
from covey.data.rendering import ROW_COLUMNS, as_written, chat_ids, clean, next_turn, refusals, say_once
from covey.errors import DataError, ModelError
from covey.types import Message, Prompt

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "function")
_ANSWERS = ("tool", "ipython", "function")
"""Roles of answers, whose content may be an object."""


def check_prompt(value: Any, where: str) -> None:
    """Raise DataError unless `value` is text or a list of chat messages with something in it. `where` names the row."""
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where} has an empty prompt; remove the row or fill it.")
        return
    if value is None:
        raise DataError(f"{where} has no prompt (null); remove the row or fill it.")
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise DataError(
            f"{where} has a prompt of type {type(value).__name__}; it must be text or a list of chat messages."
        )
    if not value:
        raise DataError(f"{where} has an empty list of messages as its prompt; remove the row or fill it.")
    for message in value:
        _check_message(message, where)


def _check_message(message: Any, where: str) -> None:
    example = '{"role": "user", "content": "..."}'
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f"{where} has a message that is not of the form {example}: {str(message)[:80]}.")
    if message["role"] not in ROLES:
        raise DataError(f"{where} has a message with the role {message['role']!r}; known roles are {', '.join(ROLES)}.")
    content = message.get("content")
    is_object = isinstance(content, Mapping) and message["role"] in _ANSWERS
    if not (isinstance(content, str | Sequence) or is_object or message.get("tool_calls")):
        raise DataError(
            f"{where} has a message whose content is {type(content).__name__}; it must be text, as in {example}."
        )


def to_prompt(
    row: Mapping[str, Any],
    uid: str,
    where: str,
    tokenizer: Any,
    template: Mapping[str, Any],
    processor: Any = None,
    features: Mapping[str, Any] | None = None,
) -> Prompt:
    """The row as a prompt, its images, sounds and videos through `processor`. Raises DataError or ModelError with `where` in the sentence.

    `features`: those of the data set, which tell its nulls from Arrow's, as in `as_written`.
    """
    check_prompt(row.get("prompt"), where)
    row = as_written(row, features, ROW_COLUMNS)
    value = row["prompt"]
    columns = {name: column for name, column in row.items() if name != "prompt"}
    if processor is not None:
        return media_prompt(row, uid, where, processor, {**template, **template_of_row(row, where)}, columns)
    if kinds := row_kinds(row):
        nouns = " and ".join(f"{kind.noun}s" for kind in kinds)
        raise DataError(
            f"{where} has {nouns}, but the model or its processor takes text alone; give a model that reads {nouns} with its "
            f"processor, or remove the {nouns}."
        )
    if isinstance(value, str):
        try:
            ids = tokenizer(text=value)["input_ids"]  # special tokens as the tokenizer adds them, which is TRL's rule
        except (TypeError, UnicodeError) as error:
            raise DataError(f"{where} has a prompt that is no Unicode text (half of a character); mend it.") from error
        return Prompt(uid=uid, text=value, token_ids=tuple(ids), columns=columns)
    messages = tuple(clean(message) for message in value or ())
    refuse_openai_parts(messages, where)
    if messages[-1]["role"] == "assistant" and messages[-1].get("content"):
        say_once(
            "Prompts end with a message of the assistant, which the model continues. If that is the answer, take it off: "
            "leave prompt_column out for a column 'messages', whose last turn then becomes the column 'answer'."
        )
    options = {**template, **template_of_row(row, where)}
    if row.get("tools") and "tools" not in options:
        say_once(
            "The column 'tools' is not shown to the model: beside a column 'prompt' it goes to rewards, environments and agents. Give the chat template "
            "a column chat_template_kwargs with {'tools': [...]}, or the run tools=[...] to call."
        )
    ids = encode_chat(messages, where, tokenizer, options)
    return Prompt(uid=uid, messages=messages, token_ids=ids, columns=columns)


def template_of_row(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Options of the chat template in a row's column, without those that are null. Raises DataError for no mapping."""
    template = row.get("chat_template_kwargs") or {}
    if not isinstance(template, Mapping):
        raise DataError(
            f"{where} has chat_template_kwargs of type {type(template).__name__}; give a mapping, or leave it out."
        )
    return {name: value for name, value in template.items() if value is not None}


def template_of_prompt(prompt: Prompt, where: str) -> dict[str, Any]:
    """Options of the chat template that the run's leave out: the tools of its environment, and those of its row."""
    shown: dict[str, Any] = {"tools": list(prompt.tools)} if prompt.tools else {}
    return {**shown, **template_of_row(prompt.columns, where)}


def behind_last_user(messages: Sequence[Message], content: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a text or parts behind the last one of the user; as one of the user's where there is none."""
    changed = [dict(message) for message in messages]
    last = next((message for message in reversed(changed) if message.get("role") == "user"), None)
    if last is None:
        return [*changed, {"role": "user", "content": content if isinstance(content, str) else list(content)}]
    before = last.get("content") or ""
    as_parts = lambda value: [{"type": "text", "text": value}] * bool(value) if isinstance(value, str) else list(value)
    both_texts = isinstance(before, str) and isinstance(content, str)
    last["content"] = f"{before}{content}" if both_texts else [*as_parts(before), *as_parts(content)]
    return changed


def encode_chat(
    messages: Sequence[Message], where: str, tokenizer: Any, template: Mapping[str, Any]
) -> tuple[int, ...]:
    """[L] ids of a conversation that is the model's turn next; one that ends with the assistant is continued.

    Control tokens are the template's own: `<|im_end|>` in a message stays text.

    Raises ModelError when the tokenizer has no chat template, DataError when the template refuses the messages.
    """
    if getattr(tokenizer, "chat_template", None) is None and not template.get("chat_template"):
        raise ModelError(
            f"{where} is a list of chat messages, but the tokenizer has no chat template; use an instruct model's tokenizer, "
            "set tokenizer.chat_template, or give prompts as plain text."
        )
    with refusals(where, "chat template", "messages"):
        ids = chat_ids(tokenizer, messages, **{**next_turn(messages), **template})
    return tuple(ids)
