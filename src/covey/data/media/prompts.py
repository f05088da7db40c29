"""A row with images, sounds or videos to a prompt: items opened, placed, and handed to the model's processor once."""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from covey.data.media.images import open_image, preview_image
from covey.data.media.kinds import IMAGE, KINDS, SOUND, VIDEO, Kind
from covey.data.media.places import Items, column_items, expect_places, with_places
from covey.data.media.sounds import Sound, open_sound, preview_sound
from covey.data.media.videos import open_video, preview_video
from covey.data.rendering import HiddenMarks, as_template_takes, clean, keeping_text, next_turn, refusals, with_text
from covey.errors import DataError
from covey.types import Media, Message, Prompt

_TEXT_KEYS = ("input_ids", "attention_mask")
_DIGEST_RATE = 16_000
"""Samples a second at which sounds are compared."""


def media_prompt(
    row: Mapping[str, Any],
    uid: str,
    where: str,
    processor: Any,
    template: Mapping[str, Any],
    columns: Mapping[str, Any],
) -> Prompt:
    """A row for a model that reads media, with or without them, as a prompt whose ids hold each item's placeholders.

    A plain prompt holds the processor's placeholder once for each item. In chat messages the places are parts such as
    `{"type": "image"}`; without any, the items of the columns come before the text of the first user message, as in TRL.
    Sounds in `columns` become dicts of `array` and `sampling_rate`. Raises DataError with `where` in the sentence.
    """
    items = column_items(row, where)
    value = row["prompt"]
    if reads_conversations(processor):
        return _conversation(row, items, uid, where, processor, template, columns)
    if isinstance(value, str):
        opened = _opened(items, where, processor)
        ids, media = _process(value, opened, where, processor, is_rendered=False)
        return Prompt(uid=uid, text=value, token_ids=ids, media=media, columns=_heard(columns, opened))
    shown, ordered = with_places([clean(message) for message in value], items, where)
    opened = _opened(ordered, where, processor)
    reader, plain = keeping_text(processor, shown)
    text = _render(plain, where, processor, template)
    ids, media = _process(text, opened, where, reader, is_rendered=True)
    heard = _heard(columns, _of_columns(items, ordered, opened))
    return Prompt(uid=uid, messages=tuple(shown), token_ids=ids, media=media, columns=heard)


def reads_conversations(processor: Any) -> bool:
    """True for a processor that reads sounds inside of chat messages and takes none in its call, as Voxtral's."""
    return SOUND.is_read_by(processor) and "audio" not in inspect.signature(type(processor).__call__).parameters


def _conversation(
    row: Mapping[str, Any],
    items: Items,
    uid: str,
    where: str,
    processor: Any,
    template: Mapping[str, Any],
    columns: Mapping[str, Any],
) -> Prompt:
    """A row for such a processor, which tokenizes messages itself; control tokens in a message are text to it."""
    value, name = row["prompt"], type(processor).__name__
    if isinstance(value, str):
        if any(items.values()):
            raise DataError(
                f"{where} is plain text, but {name} takes sounds in chat messages alone; give chat messages."
            )
        ids = tuple(processor.tokenizer(value)["input_ids"])
        return Prompt(uid=uid, text=value, token_ids=ids, columns=columns)
    if template or value[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: {name} has no chat template that takes options or continues a message; leave out chat_template_kwargs, and let "
            "the prompt end with a message of the user."
        )
    shown, ordered = with_places([with_text(clean(message)) for message in value], items, where)
    opened = _opened(ordered, where, processor)
    waiting = list(opened[SOUND])
    place = lambda part: {**part, "base64": waiting.pop(0).as_base64()} if part.get("type") == SOUND.name else part
    messages = [
        {**message, "content": [place(part) for part in message["content"]]} if message.get("content") else message
        for message in shown
    ]
    with refusals(where, "processor", "messages"):
        made = processor.apply_chat_template(messages)
    expect_whole(made, opened[SOUND], where, processor)
    heard = _heard(columns, _of_columns(items, ordered, opened))
    ids = tuple(made["input_ids"][0].tolist())
    media = _media(made, opened) if opened[SOUND] else None
    return Prompt(uid=uid, messages=tuple(shown), token_ids=ids, media=media, columns=heard)


def _opened(items: Items, where: str, processor: Any) -> Items:
    """The items as the processor takes them. DataError for a modality that it does not read."""
    opened: Items = {}
    for kind, values in items.items():
        if values and not kind.is_read_by(processor):
            read = " and ".join(["text", *(f"{other.noun}s" for other in KINDS if other.is_read_by(processor))])
            raise DataError(
                f"{where} has {kind.noun}s, but {type(processor).__name__} reads {read} alone; give a model whose processor reads "
                f"{kind.noun}s, or remove them."
            )
        opened[kind] = [_open(kind, value, f"{where}: {kind.noun} {i}", processor) for i, value in enumerate(values)]
    return opened


def _open(kind: Kind, value: Any, where: str, processor: Any) -> Any:
    if kind is SOUND:
        return open_sound(value, where, sound_reader(processor).sampling_rate)
    return (open_image if kind is IMAGE else open_video)(value, where)


def sound_reader(processor: Any) -> Any:
    """The part of a processor that reads sounds."""
    return next(part for name in SOUND.parts if (part := getattr(processor, name, None)) is not None)


def _of_columns(items: Items, ordered: Items, opened: Items) -> Items:
    """The opened sounds of the columns, in their order there. `opened` has the order of `ordered`, with those of message parts."""
    by_id = {id(value): sound for value, sound in zip(ordered[SOUND], opened[SOUND], strict=True)}
    return {SOUND: [by_id[id(value)] for value in items[SOUND]]}


def _heard(columns: Mapping[str, Any], opened: Items) -> dict[str, Any]:
    """The columns, sounds as the model hears them."""
    sounds = [sound.as_column() for sound in opened.get(SOUND, ())]
    single, plural = SOUND.columns
    heard = {single: sounds[0]} if columns.get(single) is not None and sounds else {plural: sounds} if sounds else {}
    return {**columns, **heard}


def _render(messages: Sequence[Message], where: str, processor: Any, template: Mapping[str, Any]) -> str:
    """The text of a conversation that is the model's turn next, placeholders not yet expanded."""
    how = {**next_turn(messages), **template}
    has_template = getattr(processor, "chat_template", None) or template.get("chat_template")
    shown = processor if has_template else processor.tokenizer
    with refusals(where, "chat template", "messages"):
        messages = list(map(_in_parts, as_template_takes(shown, messages, how)))
        text: str = shown.apply_chat_template(messages, tokenize=False, **how)
    return text


def _in_parts(message: Message) -> Message:
    """The message, a text as a part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _process(
    text: str, opened: Items, where: str, processor: Any, *, is_rendered: bool
) -> tuple[tuple[int, ...], Media | None]:
    """[L] ids with every item's placeholders, expanded once, and the tensors of the items."""
    for kind in KINDS:
        expect_places(text, len(opened[kind]), kind, where, processor)
    bos = getattr(processor.tokenizer, "bos_token", None)
    options = {"add_special_tokens": False} if is_rendered and bos and text.startswith(bos) else {}
    present = [kind for kind in KINDS if opened[kind]]
    if not present:
        return tuple(processor.tokenizer(text, **options)["input_ids"]), None
    try:
        with refusals(where, "processor", " and ".join(f"{kind.noun}s" for kind in present)):
            made = processor(text=[text], return_tensors="pt", **options, **_arguments(opened, processor))
    except DataError as error:
        if not isinstance(processor.tokenizer, HiddenMarks):
            raise
        raise DataError(
            f"{where}: its messages spell out a control token of the model beside {_articled(present[0])}, which "
            f"{type(processor).__name__} cannot read as text; remove it from the message."
        ) from error
    expect_whole(made, opened[SOUND], where, processor)
    return tuple(made["input_ids"][0].tolist()), _media(made, opened)


def _media(made: Mapping[str, Any], opened: Items) -> Media:
    """The model inputs that the processor made of the items, with previews."""
    kinds = {name: value[0] for name, value in made.items() if name.endswith("token_type_ids")}
    tensors = {name: _tensor(value) for name, value in made.items() if name not in (*_TEXT_KEYS, *kinds)}
    return Media(
        tensors=tensors,
        token_types=kinds,
        count=sum(map(len, opened.values())),
        digests={kind.name: tuple(map(_digest, values)) for kind, values in opened.items() if values},
        previews=(
            *map(preview_image, opened[IMAGE]),
            *map(preview_sound, opened[SOUND]),
            *map(preview_video, opened[VIDEO]),
        ),
    )


def as_returned(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a tool's answer with its item as the model sees it: images of Pillow, lists of these, a dict of samples."""
    kind, read = part["type"], {"image": open_image, "video": open_video}.get(part["type"])
    return {"type": kind, kind: part[kind] if read is None else read(part[kind], "an answer")}


def _digest(item: Any) -> str:
    return media_digest(item.samples if isinstance(item, Sound) else item)


def _articled(kind: Kind) -> str:
    return f"{'an' if kind.noun[0] in 'aeiou' else 'a'} {kind.noun}"


def _arguments(opened: Items, processor: Any) -> dict[str, Any]:
    """Arguments of the processor's call for these items."""
    values = {**opened, SOUND: [sound.samples for sound in opened[SOUND]]}
    arguments: dict[str, Any] = {kind.argument: values[kind] for kind in KINDS if values[kind]}
    if opened[SOUND]:
        arguments["sampling_rate"] = sound_reader(processor).sampling_rate
    if opened[VIDEO]:
        arguments["do_sample_frames"] = False  # every frame of the list is read
    return arguments


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))


def expect_whole(made: Mapping[str, Any], sounds: Sequence[Sound], where: str, processor: Any) -> None:
    """Raise DataError for a sound of which the processor took the beginning alone."""
    features = made.get("input_features")
    if not sounds or features is None or len(features) != len(sounds):  # split into windows: nothing is cut
        return
    reader = sound_reader(processor)
    masks = [
        value
        for name, value in made.items()
        if name.endswith("mask") and name not in _TEXT_KEYS and value.shape in (features.shape[::2], features.shape[:2])
    ]
    for i, sound in enumerate(sounds):
        frames = int(masks[0][i].sum()) if masks else max(features.shape[1:])
        seconds = frames * reader.hop_length / reader.sampling_rate
        if sound.seconds > seconds + 0.1:
            raise DataError(
                f"{where}: sound {i} lasts {sound.seconds:.1f} seconds, of which {type(processor).__name__} takes the first "
                f"{seconds:.1f}; cut it."
            )


def row_media(row: Mapping[str, Any], where: str) -> dict[str, list[str]]:
    """Digests of what the items of a row's columns show, by modality: the same for a file and the opened image."""
    open_item = lambda kind, value: (
        open_sound(value, where, _DIGEST_RATE) if kind is SOUND else _open(kind, value, where, None)
    )
    items = column_items(row, where)
    return {kind.name: [_digest(open_item(kind, value)) for value in items[kind]] for kind in KINDS if items[kind]}


def media_digest(value: Any) -> str:
    """Digest of a row's column: pixels of opened images, samples of arrays, else the stored value."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return ",".join(map(media_digest, value))
    content = f"{value.size}".encode() + value.tobytes() if hasattr(value, "tobytes") else str(value).encode()
    return hashlib.sha256(content).hexdigest()[:16]
