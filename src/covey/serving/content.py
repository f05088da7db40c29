"""Images, sounds and videos in chat requests: never a file or an address; and those of a row as an agent sends them."""

import base64
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

from covey.data.media import SOUND, items_of, media_prompt, open_image, open_sound, open_video, png, with_items
from covey.data.media.files import from_base64
from covey.data.rendering import for_endpoint
from covey.data.thoughts import without_refused_thoughts
from covey.errors import DataError
from covey.serving.errors import bad
from covey.types import Message, Prompt

_URLS = {"image_url": "image", "audio_url": "audio"}
_ITSELF = ("image", "audio", "video")


def content_of(parts: Sequence[Any], place: str, reads_media: bool) -> str | list[dict[str, Any]]:
    """The content of a message from its parts: one text, or parts in which images and sounds are bytes. Raises APIError."""
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if all(isinstance(text, str) for text in texts):
        return "".join(map(str, texts))
    if not reads_media:
        raise bad(f"{place} has a part that is no text; only text is read.", place)
    return [
        {"type": "text", "text": text} if isinstance(text, str) else _item(part, f"{place}[{i}]")
        for i, (part, text) in enumerate(zip(parts, texts, strict=True))
    ]


def _item(part: Any, place: str) -> dict[str, Any]:
    """A part with an image, a sound or a video, whose content is bytes."""
    kind = part.get("type") if isinstance(part, dict) else None
    held = part.get(kind) if isinstance(kind, str) else None
    if kind in _URLS:
        name = _URLS[kind]
        return {"type": name, name: _bytes(held.get("url") if isinstance(held, dict) else held, place)}
    if kind == "input_audio" and isinstance(held, dict) and isinstance(held.get("data"), str):
        return {"type": "audio", "audio": _decoded(held["data"], place)}
    if kind == "video" and isinstance(held, list):
        return {"type": "video", "video": [_bytes(frame, place) for frame in held]}
    if kind in _ITSELF:
        return {"type": kind, kind: _bytes(held, place)}
    raise bad(
        f"{place} is none of the parts that are read: text, image_url, input_audio, audio_url, and video with a list of its frames.",
        place,
    )


def _bytes(value: Any, place: str) -> bytes:
    head, comma, content = value.partition(",") if isinstance(value, str) else ("", "", "")
    if not (head.startswith("data:") and head.endswith(";base64") and comma):
        raise bad(
            f"{place} must hold its content as data:TYPE;base64,...; no file and no other address is opened.", place
        )
    return _decoded(content, place)


def _decoded(text: str, place: str) -> bytes:
    try:
        return from_base64(text, place)
    except DataError as error:
        raise bad(str(error), place) from error


class MediaReader:
    """A processor as an endpoint uses it: one request at a time, with a tokenizer that nothing else uses."""

    def __init__(self, processor: Any) -> None:
        self.processor, self._lock = copy(processor), threading.Lock()
        self.processor.tokenizer = deepcopy(processor.tokenizer)

    @property
    def template(self) -> dict[str, Any]:
        """The processor's chat template, which may not be the tokenizer's, as an option of it."""
        theirs = getattr(self.processor, "chat_template", None)
        return {} if theirs is None else {"chat_template": theirs}

    def prompt(
        self, messages: Sequence[Message], options: Mapping[str, Any], add_prompt: bool, items: dict[str, Any]
    ) -> Prompt:
        """The conversation as a prompt. In its messages, images and sounds are the digests of their content. Raises DataError.

        `items`: the content by digests, for parts that hold these alone; those of the messages are added.
        """
        how, sent = dict(options), [_changed(message, lambda part: _filled(part, items)) for message in messages]
        if not add_prompt or sent[-1]["role"] == "assistant":  # a message of the assistant is not gone on with here
            how |= {"add_generation_prompt": add_prompt, "continue_final_message": False}
        made = without_refused_thoughts(lambda shown: self._read(shown, how), sent, DataError)
        digests = {} if made.media is None else made.media.digests
        waiting = {kind: iter(of_kind) for kind, of_kind in digests.items()}

        def shown(part: dict[str, Any]) -> dict[str, Any]:
            if part["type"] == "text":
                return part
            digest = next(waiting[part["type"]])
            items[digest] = part[part["type"]]
            return {"type": part["type"], "digest": digest}

        return replace(made, messages=tuple(_changed(message, shown) for message in sent))

    def _read(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Prompt:
        with self._lock:
            return media_prompt({"prompt": messages}, "0", "messages", self.processor, options, {})


def _changed(message: Message, change: Callable[[Any], Any]) -> dict[str, Any]:
    """The message, with the parts of its content changed."""
    content = message.get("content")
    return {**message, "content": [change(part) for part in content] if isinstance(content, list) else content}


def _filled(part: dict[str, Any], items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": part["type"], part["type"]: items[part["digest"]]} if "digest" in part else part


def openai_messages(prompt: Prompt) -> list[Message]:
    """The messages of a row with its images, sounds and videos in them and objects as JSON, as OpenAI's clients send them.

    Raises DataError for a prompt that is no chat, and for an item that is in a message of the row instead of a column.
    """
    if prompt.media is None:
        return [for_endpoint(message) for message in prompt.messages or ()]
    if prompt.messages is None:
        raise DataError(
            f"prompt {prompt.uid} is plain text with images or sounds, and an agent sends these in chat messages; write it as "
            '[{"role": "user", "content": "..."}].'
        )
    filled = with_items(prompt.messages, items_of(prompt, "which an agent cannot be handed"))
    return [_changed(for_endpoint(message), lambda part: _openai_part(part, prompt.uid)) for message in filled]


def _openai_part(part: Any, uid: str) -> Any:
    kind, where = part.get("type"), f"prompt {uid}"
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": _png(open_image(part["image"], where))}}
    if kind == "video":
        return {"type": "video", "video": [_png(frame) for frame in open_video(part["video"], where)]}
    if kind == SOUND.name:
        sound = open_sound(part["audio"], where, part["audio"]["sampling_rate"])  # as the model hears it
        return {"type": "input_audio", "input_audio": {"data": sound.as_base64(), "format": "wav"}}
    return part


def _png(image: Any) -> str:
    """The image without loss."""
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"
