"""Public layouts of data sets as prompts: ShareGPT, OpenAI logs, Alpaca, APPS, verl and DAPO, open-r1.

A conversation that ends with the assistant is parted: its last turn is the column `answer`, never a part of the prompt.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import datasets

from covey.data.rendering import as_written, clean, content_text, say_once
from covey.data.tables import column_set, mapped
from covey.errors import DataError

_SHAREGPT = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bard", "bing", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
_CHATS = ("messages", "conversations", "conversation")
_TAKEN = "{name}: the last turn of each conversation in {column!r}, the assistant's, is the column 'answer'; the turns before it are the prompt."

Change = Callable[[Mapping[str, Any]], dict[str, Any]]
"""New columns of a row."""


def with_prompts(dataset: Any, name: str, chosen: Mapping[str, str]) -> Any:
    """The data set with `prompt` and `answer` where its layout is a known one; as it is otherwise.

    `chosen`: columns that the user renames, new name to old; those are the user's. The log says once where the columns come from.
    """
    have = list(getattr(dataset, "column_names", None) or ())
    has_prompt, prompt_column = "prompt" in have or "prompt" in chosen, chosen.get("prompt", "prompt")
    new: list[tuple[Change, str, str | None]] = []
    first = _first_row(dataset) if have else {}
    begin: Any = first.get(prompt_column)
    if has_prompt and _is_chat(begin) and "from" in begin[0] and "role" not in begin[0]:
        new.append(_split_turns(first, prompt_column, name))
    elif not has_prompt:
        new += _prompt_layout(have, first, name)
    if "ground_truth" in (first.get("reward_model") or {}) if isinstance(first.get("reward_model"), Mapping) else False:
        verdict: Change = lambda row: {"answer": (row.get("reward_model") or {}).get("ground_truth")}
        new.append((verdict, f"{name}: the column 'answer' is reward_model.ground_truth.", None))
    taken = {*have, *(column for column in chosen if column != "prompt")} - {prompt_column if has_prompt else ""}
    stays = {old for new_name, old in chosen.items() if new_name != "prompt"}
    for change, sentence, gone in new:
        dataset = _add_columns(dataset, change, taken, [gone] if gone and gone not in stays else [])
        say_once(sentence)
    return dataset


def _prompt_layout(have: Collection[str], first: Mapping[str, Any], name: str) -> list[tuple[Change, str, str | None]]:
    """The layout of a data set without prompts: how its columns are made, the sentence about it, and the column that goes; or none."""
    chat = next((column for column in _CHATS if _is_chat(first.get(column))), None)
    if {"problem", "answer"} <= set(have) or {"problem", "solution"} <= set(have):
        return [(lambda row: {"prompt": row["problem"]}, f"{name}: the column 'prompt' is 'problem'.", None)]
    if {"question", "input_output"} <= set(have):
        apps = lambda row: {"prompt": _paragraphs(row["question"], row.get("starter_code"))}
        return [(apps, f"{name}: the column 'prompt' is 'question', with the starter code behind it.", None)]
    if {"instruction", "output"} <= set(have):
        sentence = f"{name}: the column 'prompt' is 'instruction' and 'input', the column 'answer' is 'output'."
        return [(_alpaca, sentence, None)]
    return [] if chat is None else [_split_turns(first, chat, name)]


def _split_turns(first: Mapping[str, Any], column: str, name: str) -> tuple[Change, str, str | None]:
    sentence = _TAKEN if turns(first, column)[1] else "{name}: the column 'prompt' is the conversation in {column!r}."
    return partial(_parted, column), sentence.format(name=name, column=column), column


def turns(row: Mapping[str, Any], column: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages of a conversation before the assistant's last turn, and that turn; a turn may be several messages."""
    messages = messages_of(row, column)
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return messages[:end], messages[end:]


def messages_of(row: Mapping[str, Any], column: str) -> list[dict[str, Any]]:
    """Messages of a conversation in OpenAI's form, the column `system` first, if there is one."""
    messages = [_message(message) for message in row[column] or ()]
    if (
        isinstance(row.get("system"), str)
        and row["system"].strip()
        and not any(message["role"] == "system" for message in messages)
    ):
        messages.insert(0, {"role": "system", "content": row["system"]})
    return messages


def tools_for_template(row: Mapping[str, Any]) -> dict[str, Any]:
    """`chat_template_kwargs` with the row's column `tools`; empty without one, or where the row has such options.

    Raises DataError for what are no tools.
    """
    column = row.get("tools")
    if not column or "chat_template_kwargs" in row:
        return {}
    tools = _read_json(column)
    tools = list(map(_read_json, tools)) if isinstance(tools, list) else [None]
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(
            f"A row has {str(column)[:60]!r} in its column 'tools'; give a list of functions as JSON schemas, as text or as objects, "
            "or give the column another name."
        )
    return {"chat_template_kwargs": {"tools": tools}}


def _read_json(value: Any) -> Any:
    """The value of a text of JSON; anything else as it is."""
    with suppress(ValueError, RecursionError):
        return json.loads(value) if isinstance(value, str) else value
    return value


def _parted(column: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A conversation as the prompt and, as `answer`, the text of the assistant's last turn; tools go to the chat template."""
    before, last = turns(row, column)
    content = last[-1].get("content") if last else None
    answer = content_text(content) if isinstance(content, list) else content
    return {"prompt": before, "answer": answer, **tools_for_template(row)}


def _message(message: Any) -> dict[str, Any]:
    """A message of OpenAI's form; of ShareGPT's `from` and `value` with their roles by OpenAI's names."""
    if isinstance(message, Mapping) and "from" in message and "role" not in message:
        return {"role": _SHAREGPT.get(str(message["from"]), str(message["from"])), "content": message.get("value")}
    is_message = isinstance(message, Mapping) and "role" in message
    return dict(clean(message)) if is_message else {"role": "", "content": str(message)}


def _alpaca(row: Mapping[str, Any]) -> dict[str, Any]:
    task = _paragraphs(row["instruction"], row.get("input"))
    system, history = row.get("system"), row.get("history") or ()
    if not (system or history):
        return {"prompt": task, "answer": row["output"]}
    earlier = [
        {"role": role, "content": text}
        for pair in history
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    before = [{"role": "system", "content": system}] if system else []
    return {"prompt": [*before, *earlier, {"role": "user", "content": task}], "answer": row["output"]}


def _paragraphs(*parts: Any) -> str:
    """Texts, and numbers as a CSV file writes them, with a blank line between; those that are empty, or no number, are left out."""
    if odd := [part for part in parts if not isinstance(part, str | int | float | None)]:
        raise DataError(f"A row has {str(odd[0])[:60]!r} where the text of its prompt belongs; give a text.")
    return "\n\n".join(text for part in parts if part is not None and part == part and (text := str(part)).strip())


def _is_chat(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and bool(value)
    return is_list and all(
        isinstance(message, Mapping) and ("role" in message or "from" in message) for message in value
    )


def _first_row(dataset: Any) -> Mapping[str, Any]:
    """The first row; {} of an empty set, or of one whose first row cannot be read, which is checked later."""
    try:
        return dict(dataset[0] if hasattr(dataset, "__len__") else next(iter(dataset)))
    except (LookupError, ValueError, StopIteration, OverflowError, TypeError):
        return {}


def _add_columns(dataset: Any, change: Change, taken: Collection[str], drops: Sequence[str]) -> Any:
    """The rows with their new columns, without those whose names are `taken`."""
    if not hasattr(dataset, "__len__"):
        features, first = dataset.features, _first_row(dataset)
        changed = lambda row: {n: v for n, v in change(as_written(row, features)).items() if n not in taken}
        return mapped(dataset, changed, changed(first) if first else (), drops)
    columns: dict[str, list[Any]] = {}
    for number, row in enumerate(dataset):
        for name, value in change(as_written(row, dataset.features)).items():
            if name not in taken:
                columns.setdefault(name, [None] * len(dataset))[number] = value
    rest = dataset.remove_columns([column for column in {*drops, *columns} if column in dataset.column_names])
    return datasets.concatenate_datasets([rest, column_set(columns)], axis=1) if columns else dataset
