"""Token ids of a conversation, in which only the chat template writes control tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_OPENS, _CLOSES = "\uf8f0", "\uf8f1"
_HIDDEN = re.compile(f"{_OPENS}([0-9]+){_CLOSES}")


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    """[L] ids of `apply_chat_template(messages, **options)`; control tokens in messages, tools or options stay text.

    A user who writes `<|im_end|>` writes these characters, and not the token that ends a turn. Conversations without such
    text are tokenized in one piece, as transformers does; others piece by piece around it.
    """
    marks = control_texts(tokenizer)
    shown = {name: value for name, value in options.items() if name != "chat_template"}
    if not _holds([list(messages), shown], marks):
        encoded = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=True, return_dict=True, **options
        )
        return list(encoded["input_ids"])
    pattern = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
    places = {mark: f"{_OPENS}{i}{_CLOSES}" for i, mark in enumerate(marks)}
    hide = lambda text: pattern.sub(lambda match: places[match[0]], text)
    hidden, shown = _rewritten([list(messages), shown], hide)
    template = {"chat_template": options["chat_template"]} if "chat_template" in options else {}
    rendered = tokenizer.apply_chat_template(hidden, tokenize=False, **template, **shown)
    ids: list[int] = []
    for i, piece in enumerate(_HIDDEN.split(rendered)):
        is_mark = i % 2 == 1 and int(piece) < len(marks)
        ids += plain_ids(tokenizer, marks[int(piece)]) if is_mark else _ids(tokenizer, piece)
    return ids


def control_texts(tokenizer: Any) -> list[str]:
    """The texts of a tokenizer's control tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    texts = {
        *getattr(tokenizer, "all_special_tokens", ()),
        *(str(token) for token in added.values() if getattr(token, "special", False)),
    }
    return sorted(text for text in texts if text.strip())


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text in which no control token is read: the text in ever smaller parts."""
    ids = _ids(tokenizer, text)
    if len(text) < 2 or not set(ids) & set(_control_ids(tokenizer)):
        return ids
    half = 1 if len(text) < 4 else len(text) // 2
    return plain_ids(tokenizer, text[:half]) + plain_ids(tokenizer, text[half:])


def _control_ids(tokenizer: Any) -> list[int]:
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


def _rewritten(value: Any, rewrite: Any) -> Any:
    """The value with every text in it rewritten, keys included."""
    if isinstance(value, str):
        return rewrite(value)
    if isinstance(value, Mapping):
        return {_rewritten(name, rewrite): _rewritten(part, rewrite) for name, part in value.items()}
    return [_rewritten(part, rewrite) for part in value] if isinstance(value, list | tuple) else value
