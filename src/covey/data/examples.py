"""Supervised examples: prompts with the completion that is wanted, as text or as chat messages."""

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import torch

from covey.data.checks import check_dataset, row_of
from covey.data.layouts import tools_for_template, with_prompts
from covey.data.loading import parted, rename_columns
from covey.data.prompts import encode_chat, template_of_prompt
from covey.data.rendering import as_written, clean, content_text
from covey.data.sources import AnyDataset, opened, shown
from covey.data.tables import column_set
from covey.errors import DataError
from covey.types import Completion, Message, Prompt

_FORMS = "columns 'prompt' and 'completion', 'messages' or 'conversations' that end with the assistant's, or 'instruction' and 'output'"


def load_examples(
    source: Any, *, prompt_column: str = "prompt", completion_column: str = "completion", limit: int | None = None
) -> AnyDataset:
    """The examples of a file, a folder, a hub id or a loaded set, with the columns `prompt` and `completion`.

    Raises DataError, in one sentence, for what cannot be read or has neither form.
    """
    name = shown(source) if isinstance(source, str) else "the examples"
    dataset = opened(*parted(source, None), False, None) if not hasattr(source, "column_names") else source
    dataset = rename_columns(dataset, {"prompt": prompt_column, "completion": completion_column}, name)
    if limit is not None:
        dataset = dataset.select(range(min(limit, len(dataset))))
    return check_dataset(_as_examples(dataset, name), name)


def _as_examples(dataset: Any, name: str) -> Any:
    """The set itself, or its `messages` parted into a prompt and the assistant's last message; a column `tools` goes to the chat template."""
    have = list(dataset.column_names or [])
    if {"prompt", "completion"} <= set(have):
        return _with_tools(dataset)
    if not have or not {"prompt", "messages", "problem", "question"} & set(have):  # ShareGPT's and Alpaca's
        dataset = with_prompts(dataset, name, {})
        if {"prompt", "answer"} <= set(dataset.column_names or ()):
            return dataset.rename_columns({"answer": "completion"})
    if "messages" not in have:
        raise DataError(f"{name} has no examples to learn from: it needs {_FORMS}; it has {', '.join(have)}.")
    prompts, completions = [], []
    for index, row in enumerate(dataset.select_columns(["messages"])):
        messages = as_written(row, dataset.features)["messages"]
        if not messages or len(messages) < 2 or messages[-1].get("role") != "assistant":
            raise DataError(f"{row_of(index, name)} does not end with a message of the assistant after another one.")
        prompts.append([clean(message) for message in messages[:-1]])
        completions.append([clean(messages[-1])])
    rest = dataset.remove_columns([name for name in ("messages", "prompt", "completion") if name in have])
    parted_turns = column_set({"prompt": prompts, "completion": completions})
    return _with_tools(datasets.concatenate_datasets([rest, parted_turns], axis=1))


def _with_tools(dataset: Any) -> Any:
    """The set with the column `tools`, where it has one, among the arguments of the chat template."""
    have = list(dataset.column_names or [])
    if "tools" not in have or "chat_template_kwargs" in have:
        return dataset
    rows = (as_written(row, dataset.features) for row in dataset.select_columns(["tools"]))
    column = [tools_for_template(row).get("chat_template_kwargs") for row in rows]
    return datasets.concatenate_datasets([dataset, column_set({"chat_template_kwargs": column})], axis=1)


def encode_example(
    prompt: Prompt, completion: Any, tokenizer: Any, eos_ids: Sequence[int], template: Mapping[str, Any]
) -> Completion:
    """The wanted completion in the tokens that would follow the prompt's, with the one that ends it.

    Text is encoded apart from the prompt, as the model will meet it. Raises DataError for what is no text nor one message of the
    assistant, or where the chat template writes the conversation in another way than the prompt alone.
    """
    where = f"example {prompt.uid}"
    if isinstance(completion, str) and prompt.messages is None:
        ids = list(tokenizer(text=completion, add_special_tokens=False)["input_ids"])
        text = completion
    else:
        message = _message_of(completion, where)
        if prompt.messages is None:
            raise DataError(f"{where} has a text as its prompt and a message as its completion; give both in one form.")
        text = content_text(message.get("content"))
        ids = _after_prompt(prompt, message, where, tokenizer, template)
    ends = [place for place, token in enumerate(ids) if token in eos_ids]
    if prompt.messages is not None and ends:
        ids = ids[: ends[-1] + 1]  # templates write a line break behind the token at which the model stops
    elif not ends or ends[-1] != len(ids) - 1:
        ids.append(int(eos_ids[0]))
    return Completion(token_ids=torch.tensor(ids, dtype=torch.int64), text=text, finish="stop", source="data")


def _message_of(completion: Any, where: str) -> Message:
    if isinstance(completion, str):
        return {"role": "assistant", "content": completion}
    if isinstance(completion, Sequence) and len(completion) == 1 and completion[0].get("role") == "assistant":
        return clean(completion[0])
    raise DataError(f"{where} has a completion that is neither text nor one message of the assistant.")


def _after_prompt(
    prompt: Prompt, message: Message, where: str, tokenizer: Any, template: Mapping[str, Any]
) -> list[int]:
    how = {**template, **template_of_prompt(prompt, where), "continue_final_message": False}
    whole = encode_chat([*(prompt.messages or ()), message], where, tokenizer, how)
    start = len(prompt.token_ids)
    if whole[:start] != prompt.token_ids:
        raise DataError(
            f"{where}: the chat template writes the prompt differently once it is answered, so what the model would be shown is not "
            "what it learns; use a template whose generation prompt begins its answers."
        )
    return list(whole[start:])
