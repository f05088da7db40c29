"""Places of images, sounds and videos: parts of chat messages, and placeholders in rendered text."""

from collections.abc import Mapping, Sequence
from typing import Any

from covey.data.media.files import from_base64
from covey.data.media.kinds import KINDS, Kind, holds, parts_of
from covey.errors import DataError
from covey.types import Message, Prompt

Items = dict[Kind, list[Any]]
"""Items of a row by modality, in the order of their places."""

_OF_OPENAI = {"image_url": "image", "input_audio": "audio", "audio_url": "audio", "video_url": "video"}

MEDIA_PARTS = frozenset({*_OF_OPENAI, *(kind.name for kind in KINDS)})
"""Types of the parts of messages that are no text."""


def refuse_openai_parts(messages: Sequence[Message], where: str) -> None:
    """Raise DataError for a part in the form of OpenAI's interface."""
    for part in parts_of(messages):
        name = _OF_OPENAI.get(str(part.get("type")))
        if name is not None:
            kind = next(kind for kind in KINDS if kind.name == name)
            value = "FRAMES" if name == "video" else "PATH"
            raise DataError(
                f"{where} has a part of OpenAI's form ({part['type']}); write it as {{'type': {name!r}, {name!r}: {value}}} or put "
                f"the {kind.noun} into a column {kind.columns[1]!r}."
            )


def column_items(row: Mapping[str, Any], where: str) -> Items:
    """Items of the row's columns, in order. The two columns of a modality exclude each other."""
    items: Items = {}
    for kind in KINDS:
        (single, item), (plural, many) = ((column, row.get(column)) for column in kind.columns)
        if item is not None and many is not None:
            raise DataError(f"{where} has both {single!r} and {plural!r}; keep one of the two columns.")
        if many is not None and not (isinstance(many, Sequence) and not isinstance(many, str | bytes)):
            raise DataError(
                f"{where} has {plural!r} of type {type(many).__name__}; give a list, or name the column {single!r}."
            )
        items[kind] = [item] if holds(item) else list(many or ())
    return items


def items_of(prompt: Prompt, why: str) -> Items:
    """Items of a prompt, by its columns. Raises DataError with `why` for an item inside of a message, which no prompt holds."""
    items = column_items(prompt.columns, f"prompt {prompt.uid}")
    if prompt.media is not None and prompt.media.count > sum(map(len, items.values())):
        raise DataError(
            f"prompt {prompt.uid} holds an image or a sound inside of a message, {why}; put it into a column, such as 'image'."
        )
    return items


def with_items(messages: Sequence[Message], items: Items) -> list[Message]:
    """The messages of a prompt, their places of media filled with the items in order."""
    waiting = {kind.name: iter(values) for kind, values in items.items()}
    fill = lambda part: {**part, part["type"]: next(waiting[part["type"]])} if part.get("type") in waiting else part
    return [
        {**message, "content": [fill(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def with_places(messages: Sequence[Message], items: Items, where: str) -> tuple[list[Message], Items]:
    """The messages with every content a list of parts, or an object; parts of media empty, and the items in the order of the parts.

    Items of a modality without any part come before the text of the first user message: images, sounds, videos.
    """
    refuse_openai_parts(messages, where)
    types = {part.get("type") for part in parts_of(messages)}
    waiting = {kind: list(items[kind]) for kind in KINDS}
    ordered: Items = {kind: [] for kind in KINDS}
    loose = [{"type": kind.name} for kind in KINDS if kind.name not in types for _ in items[kind]]
    out = list[Message]()
    for message in messages:
        content = message.get("content")
        if isinstance(content, Mapping):  # an answer of a tool
            out.append(message)
            continue
        parts: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
        if message["role"] == "user" and loose:
            parts, loose = [*loose, *parts], []
        shown = [_placed(part, waiting, ordered, where) for part in parts]
        out.append({**message, "content": shown} if content is not None or shown else message)
    for kind in KINDS:
        if loose and items[kind] and kind.name not in types:
            raise DataError(f"{where} has {kind.noun}s but no user message to put them in; add one.")
        if waiting[kind]:
            raise DataError(
                f"{where} has {len(items[kind])} {kind.noun}s but {len(items[kind]) - len(waiting[kind])} {kind.name} parts for "
                f"them; give one part for each {kind.noun}."
            )
    return out, ordered


def _placed(part: Any, waiting: Items, ordered: Items, where: str) -> Any:
    """The part without its item, which goes to `ordered`: its own, or the next one that waits."""
    if not isinstance(part, Mapping):
        return part
    kind = next((kind for kind in KINDS if kind.name == part.get("type")), None)
    if kind is None:
        return {name: value for name, value in part.items() if value is not None}
    key = next((key for key in kind.sources if part.get(key) is not None), None)
    if key is None and not waiting[kind]:
        raise DataError(f"{where} has more {kind.name} parts than {kind.noun}s; give one {kind.noun} for each part.")
    if key is None:
        ordered[kind].append(waiting[kind].pop(0))
    else:
        is_text = key == "base64" and isinstance(part[key], str)
        ordered[kind].append(from_base64(part[key], f"{where}: a part") if is_text else part[key])
    return {"type": kind.name}


def expect_places(text: str, count: int, kind: Kind, where: str, processor: Any) -> None:
    """Raise DataError unless the text holds the placeholder once for each of its `count` items, not yet expanded."""
    place = kind.place(processor)
    if place is None:
        return
    inner = kind.expanded(processor) or place
    num_places = text.count(place)
    is_expanded = num_places > max(count, 1) or (inner != place and inner in text)
    if num_places == count and not is_expanded:
        return
    if is_expanded and count:
        raise DataError(
            f"{where} holds {max(num_places, text.count(inner))} {kind.name} tokens for {count} {kind.noun}{'s' * (count != 1)}; the "
            f"processor expands {place!r} itself, so write it once for each {kind.noun}."
        )
    raise DataError(
        f"{where} holds {place!r} {num_places} times, but has {count} {kind.noun}s; write it once for each {kind.noun}, or give chat "
        f"messages with a part {{'type': {kind.name!r}}} for each."
    )
