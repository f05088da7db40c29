"""Prompts that go on from an earlier answer of their session, with the tokens that were drawn instead of its text rendered again.

A client sends the whole conversation as text. Where its messages begin with those of an earlier call and the answer that this
call got, the prompt's ids are that call's prompt, its answer as drawn, and what the chat template puts behind the model's turn.
A history that says anything else is rendered as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from covey.environments import Template
from covey.types import Completion, Message, Prompt


@dataclass(frozen=True, eq=False)
class Answered:
    """An answered call, as what follows it needs it."""

    prompt: Prompt
    """As it was read."""
    rendered: tuple[int, ...]
    """Its messages through the chat template."""
    template: Template | None
    """Parser of its tool calls; None: the model was shown no tools."""
    completions: tuple[Completion, ...]


def continued(prompt: Prompt, answered: Sequence[Answered], eos_ids: Sequence[int]) -> Prompt:
    """The prompt with the drawn tokens of the longest earlier answer that it continues; unchanged if it continues none."""
    if prompt.messages is None:
        return prompt
    for call in sorted(answered, key=lambda candidate: -len(candidate.prompt.messages or ())):
        for done in reversed(call.completions):
            ids = _try_continue(prompt, call, done, frozenset(eos_ids))
            if ids is not None:
                return replace(prompt, token_ids=ids)
    return prompt


def _try_continue(prompt: Prompt, call: Answered, done: Completion, eos_ids: frozenset[int]) -> tuple[int, ...] | None:
    before, now = call.prompt.messages, prompt.messages
    if before is None or now is None or len(now) <= len(before) or now[: len(before)] != before:
        return None
    if not _is_answer(now[len(before)], call, done):
        return None
    fresh, length = prompt.token_ids, len(call.rendered)
    if fresh[:length] != call.rendered:
        return None
    end = next((i for i in range(length, len(fresh)) if fresh[i] in eos_ids), None)
    if end is None:
        return None
    written = tuple(done.token_ids.tolist())
    has_ended = bool(written) and written[-1] in eos_ids
    behind = fresh[end + 1 :] if has_ended else fresh[end:]
    return (*call.prompt.token_ids, *written, *behind)


def _is_answer(message: Message, call: Answered, done: Completion) -> bool:
    """True if an assistant's message is what the client was answered."""
    if message.get("role") != "assistant":
        return False
    text, calls = (done.text, []) if call.template is None else call.template.calls_in(done.token_ids.tolist())
    functions = [tool_call.get("function") or {} for tool_call in message.get("tool_calls") or ()]
    if len(functions) != len(calls) or (message.get("content") or "") != text:
        return False
    return all(
        _same(function, written.name, written.arguments) for function, written in zip(functions, calls, strict=True)
    )


def _same(function: Mapping[str, Any], name: str, arguments: Any) -> bool:
    return function.get("name") == name and function.get("arguments") == arguments
