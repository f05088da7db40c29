"""Images of a row to model inputs: found in a column or in chat messages, opened, and handed to the model's processor once."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.data.rendering import HiddenMarks, keeping_text
from covey.errors import DataError
from covey.files.bounded import read_bytes
from covey.types import Message, Prompt, PromptImages

IMAGE_COLUMNS = ("image", "images")
REFUSED_COLUMNS = ("audio", "audios", "video", "videos")
_MOST_BYTES = 64 << 20
"""Most bytes of one image file."""
_MOST_PIXELS = 64_000_000
_PREVIEW_SIDE = 512
_SOURCES = ("image", "path", "url", "base64")
"""Keys of an image part that may hold its image, in transformers' chat templates."""
_TEXT_KEYS = ("input_ids", "attention_mask")


def has_images(row: Mapping[str, Any]) -> bool:
    """True if the row has an image: in a column `image` or `images`, or as a part of a chat message."""
    if any(row.get(column) is not None and row.get(column) != [] for column in IMAGE_COLUMNS):
        return True
    prompt = row.get("prompt")
    return not isinstance(prompt, str) and any(part.get("type") == "image" for part in _parts(prompt or ()))


def refuse_other_media(messages: Sequence[Message], where: str) -> None:
    """Raise DataError for a part of a message that is neither text nor an image."""
    for part in _parts(messages):
        kind = part.get("type")
        if kind in ("audio", "video", "input_audio", "audio_url", "video_url"):
            raise DataError(
                f"{where} has a message with a part of type {kind!r}; audio and video are not supported, remove the part or the row."
            )
        if kind == "image_url":
            raise DataError(
                f"{where} has an image part of OpenAI's form; write it as {{'type': 'image', 'image': PATH}} or put the image into "
                "a column 'images'."
            )


def _parts(messages: Sequence[Any]) -> list[Mapping[str, Any]]:
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    lists = [content for content in contents if isinstance(content, Sequence) and not isinstance(content, str)]
    return [part for content in lists for part in content if isinstance(part, Mapping)]


def images_prompt(
    row: Mapping[str, Any],
    uid: str,
    where: str,
    processor: Any,
    template: Mapping[str, Any],
    columns: Mapping[str, Any],
) -> Prompt:
    """A row for a vision-language model, with or without images, as a prompt whose ids hold each image's tokens.

    A plain prompt holds the processor's image token once for each image. In chat messages the places are parts
    `{"type": "image"}`; without any, the images of the column come before the text of the first user message, as in TRL.
    Raises DataError with `where` in the sentence.
    """
    column_images = _column_images(row, where)
    value = row["prompt"]
    if isinstance(value, str):
        ids, images = _process(value, column_images, where, processor, is_rendered=False)
        return Prompt(uid=uid, text=value, token_ids=ids, images=images, columns=columns)
    shown, ordered = with_places([_clean(message) for message in value], column_images, where)
    reader, plain = keeping_text(processor, shown)
    text = _render(plain, where, processor, template)
    ids, images = _process(text, ordered, where, reader, is_rendered=True)
    return Prompt(uid=uid, messages=tuple(shown), token_ids=ids, images=images, columns=columns)


def _column_images(row: Mapping[str, Any], where: str) -> list[Any]:
    """The images of the row's column, in order. The two columns exclude each other."""
    single, many = row.get("image"), row.get("images")
    if single is not None and many is not None:
        raise DataError(f"{where} has both 'image' and 'images'; keep one of the two columns.")
    if many is not None and not (isinstance(many, Sequence) and not isinstance(many, str | bytes)):
        raise DataError(f"{where} has 'images' of type {type(many).__name__}; give a list, or name the column 'image'.")
    return [single] if single is not None else list(many or ())


def with_places(messages: Sequence[Message], images: Sequence[Any], where: str) -> tuple[list[Message], list[Any]]:
    """The messages with every content a list of parts, image parts without their image, and the images in the order of the parts."""
    refuse_other_media(messages, where)
    has_places = any(part.get("type") == "image" for part in _parts(messages))
    waiting, out, ordered = list(images), list[Message](), list[Any]()
    to_place = 0 if has_places else len(waiting)
    for message in messages:
        content = message.get("content")
        parts: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
        if message["role"] == "user" and to_place:
            parts, to_place = [{"type": "image"}] * to_place + parts, 0
        shown = []
        for part in parts:
            if not isinstance(part, Mapping) or part.get("type") != "image":
                shown.append(_clean(part) if isinstance(part, Mapping) else part)
                continue
            inline = next((part[key] for key in _SOURCES if part.get(key) is not None), None)
            if inline is None and not waiting:
                raise DataError(f"{where} has more image parts than images; give one image for each part.")
            ordered.append(waiting.pop(0) if inline is None else inline)
            shown.append({"type": "image"})
        out.append({**message, "content": shown} if content is not None or shown else message)
    if to_place:
        raise DataError(f"{where} has images but no user message to put them in; add one.")
    if waiting:
        raise DataError(
            f"{where} has {len(images)} images but {len(images) - len(waiting)} image parts for them; give one part for each image."
        )
    return out, ordered


def _clean(part: Mapping[str, Any]) -> dict[str, Any]:
    """Without the empty fields that a table gives it because others have them."""
    return {name: value for name, value in part.items() if value is not None}


def _render(messages: Sequence[Message], where: str, processor: Any, template: Mapping[str, Any]) -> str:
    """The text of a conversation that is the model's turn next, image tokens not yet expanded."""
    continues = messages[-1]["role"] == "assistant"
    how: dict[str, Any] = {"continue_final_message": True} if continues else {"add_generation_prompt": True}
    shown = (
        processor if getattr(processor, "chat_template", None) or template.get("chat_template") else processor.tokenizer
    )
    try:
        text: str = shown.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, **{**how, **template}
        )
    except Exception as error:  # a template is a program and may raise anything
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"{where}: the chat template refused its messages ({type(error).__name__}: {reason})."
        ) from error
    return text


def _process(
    text: str, sources: Sequence[Any], where: str, processor: Any, *, is_rendered: bool
) -> tuple[tuple[int, ...], PromptImages | None]:
    """[L] ids with every image's tokens, expanded once, and the images' tensors."""
    expect_places(text, len(sources), where, processor)
    bos = getattr(processor.tokenizer, "bos_token", None)
    options = {"add_special_tokens": False} if is_rendered and bos and text.startswith(bos) else {}
    if not sources:
        return tuple(processor.tokenizer(text, **options)["input_ids"]), None
    pictures = [opened(source, f"{where}: image {i}") for i, source in enumerate(sources)]
    try:
        made = processor(text=[text], images=pictures, return_tensors="pt", **options)
    except Exception as error:  # processors may raise anything on images they cannot read
        if isinstance(processor.tokenizer, HiddenMarks):
            raise DataError(
                f"{where}: its messages spell out a control token of the model beside an image, which {type(processor).__name__} "
                "cannot read as text; remove it from the message."
            ) from error
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{where}: the processor refused its images ({type(error).__name__}: {reason}).") from error
    ids = made["input_ids"][0]
    kinds = {name: value[0] for name, value in made.items() if name.endswith("token_type_ids")}
    tensors = {name: value for name, value in made.items() if name not in (*_TEXT_KEYS, *kinds)}
    images = PromptImages(
        tensors=tensors, token_types=kinds, count=len(pictures), previews=tuple(map(preview, pictures))
    )
    return tuple(ids.tolist()), images


def expect_places(text: str, count: int, where: str, processor: Any) -> None:
    """Raise DataError unless the text holds the image token once for each of its `count` images, not yet expanded."""
    place = getattr(processor, "image_token", None) or getattr(processor.tokenizer, "image_token", None)
    place = getattr(processor, "boi_token", place)  # Gemma 3 expands this one
    if place is None:
        return
    num_places = text.count(place)
    inner = getattr(processor.tokenizer, "image_token", place)
    is_expanded = num_places > max(count, 1) or (inner != place and inner in text)
    if num_places == count and not is_expanded:
        return
    if is_expanded and count:
        raise DataError(
            f"{where} holds {max(num_places, text.count(inner))} image tokens for {count} image{'s' * (count != 1)}; the processor "
            f"expands {place!r} itself, so write it once for each image."
        )
    raise DataError(
        f"{where} holds {place!r} {num_places} times, but has {count} images; write it once for each image, or give chat messages "
        "with a part {'type': 'image'} for each."
    )


def opened(value: Any, where: str) -> Any:
    """An RGB image of Pillow from one, a file's path, its bytes, or `datasets`' dict of the two. DataError for anything else."""
    image_class = pillow()
    if isinstance(value, Mapping):
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if isinstance(value, image_class.Image):
        return _rgb(value, where)
    if isinstance(value, str | Path):
        value = _read(str(value), where)
    if not isinstance(value, bytes):
        raise DataError(f"{where} is a {type(value).__name__}; give an image of Pillow, a path, or the file's bytes.")
    with warnings.catch_warnings():
        warnings.simplefilter("error", image_class.DecompressionBombWarning)
        try:
            return _rgb(image_class.open(io.BytesIO(value)), where)
        except (OSError, ValueError, SyntaxError, image_class.DecompressionBombError, Warning) as error:
            raise DataError(f"{where} cannot be read as an image ({error}); mend or remove it.") from error


def _read(text: str, where: str) -> bytes:
    if text.startswith("data:"):
        try:
            return base64.b64decode(text.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise DataError(f"{where} is a data: address that holds no base64 ({error}); mend it.") from error
    if text.startswith(("http://", "https://")):
        raise DataError(f"{where} is the address {text[:80]!r}; images are not downloaded, give a file's path.")
    try:
        return read_bytes(text, _MOST_BYTES, DataError)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _rgb(image: Any, where: str) -> Any:
    if image.width * image.height > _MOST_PIXELS:
        raise DataError(f"{where} has {image.width} x {image.height} pixels; make it smaller than 64 million.")
    try:
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{where} cannot be read as an image ({error}); mend or remove it.") from error


def image_digest(value: Any) -> str:
    """Digest of a row's image column: pixels of opened images, else the stored value."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return ",".join(map(image_digest, value))
    content = f"{value.size}".encode() + value.tobytes() if hasattr(value, "tobytes") else str(value).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def preview(image: Any) -> bytes:
    """The image as a file of at most 512 pixels a side: PNG of a small one, else JPEG."""
    small = image.copy()
    small.thumbnail((_PREVIEW_SIDE, _PREVIEW_SIDE))
    file = io.BytesIO()
    if small.width * small.height <= 128 * 128:
        small.save(file, "PNG")
    else:
        small.save(file, "JPEG", quality=85)
    return file.getvalue()


def pillow() -> Any:
    """Pillow's `Image`. DataError where it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("Images need Pillow: pip install 'covey[vision]'.") from error
    return Image


def with_paths(dataset: Any, source: Any) -> Any:
    """The data set of a file or folder with the paths in its image columns relative to that folder, unless they are absolute."""
    place = Path(str(source)).expanduser()
    columns = [name for name in IMAGE_COLUMNS if name in (dataset.column_names or ())]
    if not columns or not isinstance(source, str | Path) or not place.exists():
        return dataset
    folder = place if place.is_dir() else place.parent

    def resolved(value: Any) -> Any:
        if isinstance(value, list):
            return [resolved(item) for item in value]
        is_path = isinstance(value, str) and not value.startswith(("data:", "http://", "https://"))
        return str(folder / value) if is_path else value

    for name in columns:
        feature = (dataset.features or {}).get(name)
        kind = getattr(getattr(feature, "feature", feature), "dtype", None)
        if kind not in ("string", "large_string"):
            continue
        if hasattr(dataset, "__len__"):
            dataset = dataset.remove_columns(name).add_column(name, [resolved(value) for value in dataset[name]])
        else:
            dataset = dataset.map(lambda row, name=name: {name: resolved(row[name])})
    return dataset
