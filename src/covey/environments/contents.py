"""Contents of answers: text, or parts with images, sounds and videos, as tools return them, chat templates take them and rewards see them."""

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey.data.media import (
    KINDS,
    MEDIA_PARTS,
    SOUND,
    Kind,
    files,
    media_digest,
    open_image,
    open_sound,
    open_video,
    png,
    refuse_openai_parts,
    sound_reader,
)
from covey.errors import DataError


class MediaReturnedError(DataError):
    """A tool returned an image, a sound or a video that the model cannot be shown."""


Content = str | list[dict[str, Any]]


def content_of(value: Any, *, has_numbers: bool = False) -> Content:
    """A tool's return value as the content of its answer: text as it is, parts with media as they are, JSON where it can be, else `str`.

    Images of Pillow and parts with items that are no JSON, alone or in a list with texts, become parts. Raises DataError for an image
    of Pillow anywhere else, MediaReturnedError for an array of pixels, of which `str` leaves out most. `has_numbers`: the caller
    writes all numbers of arrays itself.
    """
    if isinstance(value, str):
        return value
    entries = list(value) if isinstance(value, list | tuple) else [value]
    is_content = any(map(_is_image, entries)) or (not isinstance(value, Mapping) and _are_parts(entries))
    if is_content or (any(_are_parts([entry]) for entry in entries) and _json(value) is None):
        return [_as_part(entry) for entry in entries]
    return _as_text(value, has_numbers)


def _json(value: Any) -> str | None:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return None


def _as_text(value: Any, has_numbers: bool = False) -> str:
    """Raises DataError for a value that holds an image, which would be its `repr`; MediaReturnedError for one that holds pixels."""
    text = value if isinstance(value, str) else _json(value)
    if text is None and not has_numbers and (pixels := _first_in(value, _are_pixels)) is not None:
        raise MediaReturnedError(
            f"what a tool returned holds an array of bytes of the shape {list(pixels.shape)}, of which a text would leave out most; return "
            "PIL.Image.fromarray(array) to show it, or array.tolist() for its numbers."
        )
    if text is None and _first_in(value, _is_image) is not None:
        raise DataError(f"an image is inside of a {type(value).__name__}; return it, or a list of texts and images.")
    return str(value) if text is None else text


def _is_image(value: Any) -> bool:
    return any(kind.__module__.startswith("PIL.") for kind in type(value).__mro__)


def _are_pixels(value: Any) -> bool:
    """True for an image or a video of more bytes than `str` writes, as an array of numpy or torch with 3 or 4 colours."""
    shape: Any = getattr(value, "shape", None)
    is_shape = isinstance(shape, tuple) and len(shape) in (3, 4) and all(isinstance(size, int) for size in shape)
    is_picture = is_shape and bool({shape[-1], shape[-3]} & {3, 4}) and math.prod(shape) > _WRITTEN
    return is_picture and str(getattr(value, "dtype", "")).endswith("uint8")


_WRITTEN = 1000
"""Most values of an array that numpy and torch write all."""


def _first_in(value: Any, is_so: Callable[[Any], bool], depth: int = 4) -> Any:
    """The value, or the first in its lists and objects, for which `is_so` is true; None without one."""
    if is_so(value):
        return value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    deeper = (_first_in(entry, is_so, depth - 1) for entry in inner) if depth else ()
    return next((entry for entry in deeper if entry is not None), None)


def _are_parts(parts: Sequence[Any]) -> bool:
    """True for the content of a message in parts that are not all text."""
    kinds = {str(part.get("type")) if isinstance(part, Mapping) else "" for part in parts}
    return bool(kinds & MEDIA_PARTS) and kinds <= {"text", *MEDIA_PARTS}


def _as_part(entry: Any) -> dict[str, Any]:
    if isinstance(entry, Mapping) and entry.get("type") in {"text", *MEDIA_PARTS}:
        return dict(entry)
    return {"type": "image", "image": entry} if _is_image(entry) else {"type": "text", "text": _as_text(entry)}


def text_of(parts: Sequence[Mapping[str, Any]]) -> str:
    """The text of parts, `<image>` in the place of an image."""
    return "".join(str(part.get("text") or "") if part["type"] == "text" else f"<{part['type']}>" for part in parts)


def media_in(parts: Sequence[Mapping[str, Any]], tool: str) -> list[Kind]:
    """The modality of each part that is no text. Raises MediaReturnedError for parts in the form of OpenAI's interface."""
    try:
        refuse_openai_parts([{"content": parts}], f"what tool {tool!r} returned")
    except DataError as error:
        raise MediaReturnedError(str(error)) from error
    return [kind for part in parts for kind in KINDS if kind.name == part["type"]]


def limited(parts: Sequence[Mapping[str, Any]], limit: Callable[[str], str]) -> list[dict[str, Any]]:
    """The parts with their texts cut as one: a text that is over the limit comes first, media in their order behind it."""
    texts = "".join(str(part.get("text") or "") for part in parts if part["type"] == "text")
    if (shown := limit(texts)) == texts:
        return [dict(part) for part in parts]
    return [{"type": "text", "text": shown}, *(dict(part) for part in parts if part["type"] != "text")]


def opened(part: Mapping[str, Any], where: str, processor: Any) -> dict[str, Any]:
    """A part whose item was read once and is held as a checkpoint can hold it, with the digest of its content.

    Images are PNG files, videos lists of these, sounds arrays at the processor's rate. Raises DataError for an item that cannot be read.
    """
    kind, item = _item(part, where)
    if kind is None:
        return {"type": "text", "text": str(part.get("text") or "")}
    if kind is SOUND:
        sound = open_sound(item, where, sound_reader(processor).sampling_rate)
        return {"type": kind.name, kind.name: sound.as_column(), "digest": media_digest(sound.samples)}
    read, content = _seen(kind, item, where, png)
    return {"type": kind.name, kind.name: content, "digest": media_digest(read)}


def sendable(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A part as JSON, its item as `data:` addresses, without loss."""
    kind, item = _item(part, where)
    address = lambda content: f"data:;base64,{base64.b64encode(content).decode()}"
    if kind is None:
        return dict(part)
    if kind is SOUND:
        item = files.content_of(item, SOUND, where)
        if not isinstance(item, bytes):
            return {"type": kind.name, "base64": open_sound(item, where, item["sampling_rate"]).as_base64()}
        return {"type": kind.name, kind.name: address(item)}
    _, content = _seen(kind, item, where, lambda image: address(png(image)))
    return {"type": kind.name, kind.name: content}


def _seen(kind: Kind, item: Any, where: str, write: Callable[[Any], Any]) -> tuple[Any, Any]:
    """An image, or the list of a video's frames, of Pillow; and what `write` makes of each."""
    read = (open_video if kind.name == "video" else open_image)(item, where)
    return read, list(map(write, read)) if isinstance(read, list) else write(read)


def _item(part: Mapping[str, Any], where: str) -> tuple[Kind | None, Any]:
    """The modality of a part, None of text, and its item."""
    kind = next((kind for kind in KINDS if kind.name == part["type"]), None)
    if kind is None:
        return None, None
    key = next((key for key in kind.sources if part.get(key) is not None), None)
    if key is None:
        raise DataError(
            f"{where} has a part of the type {kind.name!r} without {kind.noun}; put it under {kind.name!r}."
        )
    return kind, f"data:;base64,{part[key]}" if key == "base64" and isinstance(part[key], str) else part[key]


def shown_parts(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parts as they stand in messages: media by their digests alone."""
    return [{name: value for name, value in part.items() if name in ("type", "text", "digest")} for part in parts]
