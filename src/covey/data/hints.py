"""Hints of a teacher: feedback on each completion, and the prompt with it."""

from collections.abc import Mapping, Sequence
from typing import Any

from covey.data.prompts import behind_last_user, encode_chat, template_of_prompt
from covey.errors import ConfigError
from covey.types import Completion, Group, Prompt, lowest_passing, reaches

OF_GROUP = ("best", "successful", "tool_result")
"""Feedback that comes from the completions, not from a column."""

NO_AGENT = (
    "A teacher's feedback cannot be put into the prompt that an agent shows the model, such as with a system message of its own; "
    "leave `feedback` out."
)
NO_MEDIA = "A teacher's feedback cannot be put into prompts with images, sounds or videos; leave `feedback` out."


def hints_of(group: Group, feedback: str, threshold: float | None = None) -> list[str | None]:
    """The teacher's feedback on each completion: of the group, of its episode, of a column of a reward or of the data set."""
    if feedback == "best":
        return _best_of(group, threshold)
    if feedback == "successful":
        return _success_of(group, 1.0 if threshold is None else threshold)
    if feedback == "tool_result":
        return [_last_answer(completion) for completion in group.completions]
    if feedback in group.extras:
        values: Sequence[Any] = group.extras[feedback]
    elif feedback in group.prompt.columns:
        values = [group.prompt.columns[feedback]] * group.size
    else:
        columns = [*group.extras, *group.prompt.columns, *OF_GROUP]
        raise ConfigError(f"The teacher's feedback={feedback!r} is no column here; there are {', '.join(columns)}.")
    return [text_of_feedback(value, feedback) for value in values]


def text_of_feedback(value: Any, column: str) -> str | None:
    """The feedback as text; None where there is none. Raises ConfigError for a value that is no text."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if not isinstance(value, (str, int, float)):
        raise ConfigError(
            f"The teacher's feedback={column!r} holds {type(value).__name__}, no text; name a column of text, or make one with "
            "log_extra in a reward."
        )
    return str(value)


def _success_of(group: Group, threshold: float) -> list[str | None]:
    """Text of the first other completion whose reward reaches the threshold; None where there is none."""
    if group.totals is None:
        return [None] * group.size
    right = [g for g, total in enumerate(group.totals.tolist()) if reaches(total, threshold)]
    first = [next((other for other in right if other != g), None) for g in range(group.size)]
    return [None if g is None else group.completions[g].text for g in first]


def _last_answer(completion: Completion) -> str | None:
    """The last answer of a tool in the completion's episode; None without one."""
    answers = [message for message in completion.messages or () if message.get("role") == "tool"]
    return text_of_feedback(answers[-1].get("content"), "tool_result") if answers else None


def _best_of(group: Group, threshold: float | None) -> list[str | None]:
    """Text of the completion with the highest reward, for completions with less; None for the others.

    With `threshold`, for those below it alone, and only where the best is not.
    """
    if group.totals is None or bool(group.totals.isnan().all()):
        return [None] * group.size
    totals = [float("-inf") if total != total else total for total in group.totals.tolist()]
    best = max(range(group.size), key=lambda g: totals[g])
    limit = totals[best] if threshold is None else lowest_passing(threshold)
    is_right = totals[best] >= limit
    return [group.completions[best].text if is_right and totals[g] < limit else None for g in range(group.size)]


def with_hint(prompt: Prompt, hint: str, template: str, tokenizer: Any, options: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids of the prompt with the hint appended to it, or to its last user message. Raises ConfigError for media."""
    if prompt.media is not None:
        raise ConfigError(NO_MEDIA)
    text = template.replace("{feedback}", hint)
    if prompt.messages is None:
        return tuple(tokenizer(text=f"{prompt.text or ''}{text}")["input_ids"])
    is_alone = all(message["role"] != "user" for message in prompt.messages)
    messages = behind_last_user(prompt.messages, text.strip() if is_alone else text)
    where = f"prompt {prompt.uid} with its feedback"
    return encode_chat(messages, where, tokenizer, {**options, **template_of_prompt(prompt, where)})
